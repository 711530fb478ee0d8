"""Gradients of G clients at once, each of its own parameters on its own batch.

The user's own ``training_step`` is run on stacked parameters by `torch.func`: its gradient under
`vmap` over the clients.

A batch smaller than B is padded, and a padded example must count for nothing. So where the loss is
a mean over examples, it is evaluated example by example (a second `vmap`, which costs nothing once
compiled), and the mean is taken with weights 0 and 1. Where it is not (batch norm, contrastive
losses), the batch stays whole and only full batches can be stacked.

Random numbers (dropout) are inputs like the batch, drawn beforehand from each client's own
generator. What the step would give to torchmetrics objects is among the outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fl_lightning.client.functional_step import Tensors, TrainingStep, map_tensors


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


class Outputs(NamedTuple):
    """What comes out of a local step besides gradients.

    Attributes:
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        given: tensors given to torchmetrics objects.
        buffers: after the step, by name; none where the loss is evaluated by example.
    """

    sums: Tensors
    given: list[Tensor]
    buffers: Tensors


class StackedGradients:
    """The gradients as a function of tensors.

    Args:
        call: the module's training step.
        weighted: evaluate the loss by example.

    Attributes:
        draw_axes: of each random number the axis over examples; None where it has none.
    """

    def __init__(self, call: TrainingStep, weighted: bool) -> None:
        self._call = call
        self._loss = self._weighted if weighted else self._whole
        self.draw_axes: list[int | None] = []

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Tensors, Outputs]:
        """Return gradients by name, shape (G, …), and what else came out.

        Args:
            params: by name, shape (G, …).
            buffers: by name, shape (G, …).
            inputs: of the step.
            shared: all clients have the same parameters, given without the first axis.
        """
        gradient = grad_and_value(self._loss, has_aux=True)
        axes = (None if shared else 0, None if shared else 0, 0)
        grads, (_, outputs) = vmap(gradient, axes, randomness="error")(params, buffers, inputs)
        return grads, outputs

    def _whole(self, params: Tensors, buffers: Tensors, inputs: Inputs) -> tuple[Tensor, Outputs]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        result = self._call(params | buffers, inputs.batch, inputs.steps, inputs.draws)
        size = inputs.valid.sum()
        sums = {
            name: torch.stack([value * (weight or size), torch.ones_like(value) * (weight or size)])
            for name, (value, weight) in result.logged.items()
        }
        return result.loss, Outputs(sums, result.given, buffers)

    def _weighted(
        self, params: Tensors, buffers: Tensors, inputs: Inputs
    ) -> tuple[Tensor, Outputs]:
        weights: dict[str, float | None] = {}

        def one(example: Any, draws: list[Tensor]) -> tuple[Tensor, Tensors, list[Tensor]]:
            batch = map_tensors(lambda x: x.unsqueeze(0), example)
            result = self._call(params, batch, inputs.steps, draws)
            weights.update({name: weight for name, (_, weight) in result.logged.items()})
            logged = {name: value for name, (value, _) in result.logged.items()}
            return result.loss, logged, result.given

        by_example = vmap(one, (0, self.draw_axes), randomness="error")
        losses, logged, given = by_example(inputs.batch, inputs.draws)
        valid = inputs.valid
        sums = {
            name: torch.stack([(value * valid).sum(), valid.sum()]) * (weights[name] or 1)
            for name, value in logged.items()
        }
        loss = (losses * valid).sum() / valid.sum().clamp(min=1)
        return loss, Outputs(sums, given, {})
