"""Gradients of G clients at once, each of its own parameters on its own batch.

The user's own ``training_step`` is run on stacked parameters by `torch.func`: its gradient under
`vmap` over the clients.

Batches stay whole, and those of one call have one size. Where the user says that the loss is a mean over
examples, smaller batches may be padded: the loss is evaluated example by example (a second `vmap`, which
costs nothing once compiled), and the mean is taken with weights 0 and 1.

Random numbers (dropout) are inputs like the batch, drawn beforehand from each client's own
generator. What the step would give to torchmetrics objects is among the outputs.

Of thin layers' weights the gradients come as two factors, see `ThinLayers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fl_lightning.engines.functional.functional_step import Tensors, Thin, TrainingStep, map_tensors


class Inputs(NamedTuple):
    """What a local step takes besides parameters; all with a first axis over clients.

    Attributes:
        batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
        valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        steps: that each client has taken, float64 of shape (G,).
        draws: random numbers, in the order in which the step draws them.
    """

    batch: Any
    valid: Tensor
    steps: Tensor
    draws: list[Tensor]


class Gradients(NamedTuple):
    """The gradients of a local step.

    Attributes:
        whole: by name, shape (G, …).
        errors: at thin layers' outputs, by the names of their weights, shape (G, B, out).
    """

    whole: Tensors
    errors: Tensors


class Outputs(NamedTuple):
    """What comes out of a local step besides gradients.

    Attributes:
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        given: tensors given to torchmetrics objects.
        buffers: after the step, by name; none where the loss is evaluated by example.
        inputs: of thin layers, by the names of their weights, shape (G, B, in).
    """

    sums: Tensors
    given: list[Tensor]
    buffers: Tensors
    inputs: Tensors


class StackedGradients:
    """The gradients as a function of tensors.

    Args:
        call: the module's training step.
        padded: evaluate the loss by example.

    Attributes:
        draw_axes: of each random number the axis over examples; None where it has none.
        thin: names of the weights whose layers are thin.
    """

    def __init__(self, call: TrainingStep, padded: bool) -> None:
        self._call = call
        self._loss = self._padded if padded else self._whole
        self.draw_axes: list[int | None] = []
        self.thin: Sequence[str] = ()

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Gradients, Outputs]:
        """Return gradients, and what else came out.

        Args:
            params: by name, shape (G, …).
            buffers: by name, shape (G, …).
            inputs: of the step.
            shared: all clients have the same parameters, given without the first axis.
        """
        weights = {name: params[name] for name in self.thin}
        others = {name: param for name, param in params.items() if name not in weights}
        zeros = {n: w.new_zeros(*inputs.valid.shape, w.shape[-2]) for n, w in weights.items()}
        gradient = grad_and_value(self._loss, (0, 1), has_aux=True)
        axis = None if shared else 0
        stacked = vmap(gradient, (axis, 0, axis, axis, 0), randomness="error")
        (whole, errors), (_, outputs) = stacked(others, zeros, weights, buffers, inputs)
        return Gradients(whole, errors), outputs

    def _whole(
        self, params: Tensors, zeros: Tensors, weights: Tensors, buffers: Tensors, inputs: Inputs
    ) -> tuple[Tensor, Outputs]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        thin = Thin(weights, zeros)
        result = self._call(params | buffers, inputs.batch, inputs.steps, inputs.draws, thin)
        size = inputs.valid.sum()
        sums = {
            name: torch.stack([value * (weight or size), torch.ones_like(value) * (weight or size)])
            for name, (value, weight) in result.logged.items()
        }
        return result.loss, Outputs(sums, result.given, buffers, result.inputs)

    def _padded(
        self, params: Tensors, zeros: Tensors, weights: Tensors, buffers: Tensors, inputs: Inputs
    ) -> tuple[Tensor, Outputs]:
        sizes: dict[str, float | None] = {}

        def one(
            example: Any, draws: list[Tensor], zeros: Tensors
        ) -> tuple[Tensor, Tensors, list[Tensor], Tensors]:
            batch, zeros = map_tensors(lambda x: x.unsqueeze(0), (example, zeros))
            result = self._call(params, batch, inputs.steps, draws, Thin(weights, zeros))
            sizes.update({name: size for name, (_, size) in result.logged.items()})
            logged = {name: value for name, (value, _) in result.logged.items()}
            rows = {name: value.squeeze(0) for name, value in result.inputs.items()}
            return result.loss, logged, result.given, rows

        by_example = vmap(one, (0, self.draw_axes, 0), randomness="error")
        losses, logged, given, rows = by_example(inputs.batch, inputs.draws, zeros)
        valid = inputs.valid
        sums = {
            name: torch.stack([(value * valid).sum(), valid.sum()]) * (sizes[name] or 1)
            for name, value in logged.items()
        }
        loss = (losses * valid).sum() / valid.sum().clamp(min=1)
        return loss, Outputs(sums, given, {}, rows)
