"""One local step of G clients as functions of tensors: gradients, optimizer, writes.

Functions of tensors and of nothing else that changes from step to step, so that each can be compiled
as one graph. The user's own ``training_step`` is run on stacked parameters by `torch.func`: its
gradient under `vmap` over the clients, each of its own parameters on its own batch.

Batches stay whole, and those of one call have one size. Where the user says that the loss is a mean over
examples, smaller batches may be padded: the loss is evaluated example by example (a second `vmap`, which
costs nothing once compiled), and the mean is taken with weights 0 and 1.

Random numbers (dropout) are inputs like the batch, drawn beforehand from each client's own
generator. What the step would give to torchmetrics objects is among the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fl_lightning.engines.functional.functional_step import Tensors, TrainingStep, map_tensors
from fl_lightning.engines.slots.stacked_optimizers import StackedRule


class Inputs(NamedTuple):
    """Inputs of a local step besides parameters; all with a first axis over clients.

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
    """Outputs of a local step besides gradients.

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
        padded: evaluate the loss by example.

    Attributes:
        draw_axes: of each random number the axis over examples; None where it has none.
    """

    def __init__(self, call: TrainingStep, padded: bool) -> None:
        self._call = call
        self._loss = self._padded if padded else self._whole
        self.draw_axes: list[int | None] = []

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Tensors, Outputs]:
        """Gradients by name, shape (G, …), and the step's other outputs.

        Args:
            params: by name, shape (G, …).
            buffers: by name, shape (G, …).
            inputs: of the step.
            shared: all clients have the same parameters, given without the first axis.
        """
        gradient = grad_and_value(self._loss, has_aux=True)
        axis = None if shared else 0
        stacked = vmap(gradient, (axis, axis, 0), randomness="error")
        gradients, (_, outputs) = stacked(params, buffers, inputs)
        return gradients, outputs

    def _whole(self, params: Tensors, buffers: Tensors, inputs: Inputs) -> tuple[Tensor, Outputs]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        result = self._call(params | buffers, inputs.batch, inputs.steps, inputs.draws)
        size = inputs.valid.sum()
        sums = {
            name: torch.stack([value * (weight or size), torch.ones_like(value) * (weight or size)])
            for name, (value, weight) in result.logged.items()
        }
        return result.loss, Outputs(sums, result.given, buffers)

    def _padded(self, params: Tensors, buffers: Tensors, inputs: Inputs) -> tuple[Tensor, Outputs]:
        sizes: dict[str, float | None] = {}

        def one(example: Any, draws: list[Tensor]) -> tuple[Tensor, Tensors, list[Tensor]]:
            batch = map_tensors(lambda x: x.unsqueeze(0), example)
            result = self._call(params, batch, inputs.steps, draws)
            sizes.update({name: size for name, (_, size) in result.logged.items()})
            logged = {name: value for name, (value, _) in result.logged.items()}
            return result.loss, logged, result.given

        by_example = vmap(one, (0, self.draw_axes), randomness="error")
        losses, logged, given = by_example(inputs.batch, inputs.draws)
        valid = inputs.valid
        sums = {
            name: torch.stack([(value * valid).sum(), valid.sum()]) * (sizes[name] or 1)
            for name, value in logged.items()
        }
        loss = (losses * valid).sum() / valid.sum().clamp(min=1)
        return loss, Outputs(sums, given, {})


@dataclass(frozen=True)
class StackedOptions:
    """How a local step is stacked.

    Attributes:
        num_slots: clients side by side, G.
        padded: the loss is a mean over examples; it is evaluated example by example, so that batches
            may be padded. If not, batches are whole, and their sizes may differ from step to step.
        clip_norm: largest norm of a client's gradient; None for no clipping.
        clip_value: largest absolute value of a gradient's numbers; None for no clipping.
        compiled: have the compiler turn the step into one graph.
        direct: have layers computed by `direct_layers`, where that is possible.
        has_pull: clients may be pulled back to where they began.
        has_shift: a vector may be added to a client's gradients.
        whole_because: why batches are not padded although the loss was said to be a mean.
    """

    num_slots: int
    padded: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    compiled: bool = False
    direct: bool = False
    has_pull: bool = False
    has_shift: bool = False
    whole_because: str = ""


class StackedTerm(NamedTuple):
    """Term that is added to the gradients: pull · (y - x) + shift.

    Attributes:
        pull: a scalar.
        starts: x by name, without the axis of clients; empty where nothing pulls.
        shifts: by name, shape (G, …); empty where there are none.
    """

    pull: Tensor
    starts: Tensors
    shifts: Tensors


class Slots(NamedTuple):
    """Tensors that a client's optimizer moves and reads.

    Attributes:
        params: by name, shape (G, …).
        states: of the optimizer, by name.
        lrs: learning rates of its parameter groups, each a scalar or one for every local step.
        term: of a correction; None where there is none.
    """

    params: Tensors
    states: dict[str, list[Tensor]]
    lrs: list[Tensor]
    term: StackedTerm | None = None


@dataclass(eq=False)
class StackedFunctions:
    """The local step, and its variant for clients that begin with it.

    Attributes:
        gradients: of the training step.
        options: how to stack.
        group_of: the optimizer's parameter group that each name is in.
        rules: how the parameters of each group move.
        masks: ``True`` where an entry may move, of parameters with frozen entries, by name.
        unused: names of parameters that the loss does not depend on: they have no gradient, which is
            not one of 0, and no step of the optimizer.
    """

    gradients: StackedGradients
    options: StackedOptions
    group_of: Mapping[str, int]
    rules: list[StackedRule] = field(default_factory=list)
    masks: Tensors = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    def step(self, inputs: Inputs, slots: Slots, buffers: Tensors) -> Outputs:
        """Step in every slot."""
        grads, outputs = self._gradients(slots.params, buffers, inputs)
        self._write(slots, self._moved(slots, grads, inputs.steps), inputs.steps)
        for name, buffer in buffers.items():
            buffer.copy_(outputs.buffers[name])
        return Outputs(outputs.sums, outputs.given, {})

    def first(self, inputs: Inputs, start: Tensors, slots: Slots) -> Outputs:
        """Step for new clients from common parameters, by name."""
        moved, outputs = self._moved_from(start, slots, inputs)
        self._write(slots, moved, inputs.steps)
        return outputs

    def only(
        self, inputs: Inputs, start: Tensors, slots: Slots, active: Tensors
    ) -> tuple[Outputs, Tensor]:
        """Deltas after `first`, shape (G, k); no parameter moves.

        Of parameters in ``active`` only the entries with these indices are among the k coordinates.
        """
        moved, outputs = self._moved_from(start, slots, inputs)
        count = self.options.num_slots  # not flatten(1): a parameter may be a scalar
        deltas = {n: (start[n] - end).reshape(count, -1) for n, end in moved.params.items()}
        for name, index in active.items():
            deltas[name] = deltas[name][:, index]
        none = inputs.valid.new_empty(count, 0)
        return outputs, torch.cat([*deltas.values(), none], 1)

    def _gradients(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Tensors, Outputs]:
        grads, outputs = self.gradients(params, buffers, inputs, shared=shared)
        return {name: grad for name, grad in grads.items() if name not in self.unused}, outputs

    def _moved_from(self, start: Tensors, slots: Slots, inputs: Inputs) -> tuple[Slots, Outputs]:
        """Slots after the first step of new clients, and the step's outputs."""
        grads, outputs = self._gradients(start, {}, inputs, shared=True)
        params = {name: value.unsqueeze(0) for name, value in start.items()}
        states = {
            name: [torch.zeros_like(grad) for _ in slots.states[name]]
            for name, grad in grads.items()
        }
        fresh = Slots(params, states, slots.lrs, slots.term)
        return self._moved(fresh, grads, inputs.steps), outputs

    def _moved(self, slots: Slots, grads: Tensors, count: Tensor) -> Slots:
        """Return the parameters that have a gradient, and their states, after the optimizer's step."""
        grads = self._clipped(_corrected(grads, slots))
        params, states = {}, {}
        for name, grad in grads.items():
            group, param = self.group_of[name], slots.params[name]
            lr = slots.lrs[group]
            if lr.ndim:  # of every local step
                lr = lr[count.long().clamp(max=len(lr) - 1)].view(-1, *[1] * (grad.ndim - 1))
            params[name], states[name] = self.rules[group].step(
                param, grad, slots.states[name], lr, count
            )
            if name in self.masks:
                params[name] = torch.where(self.masks[name], params[name], param)
        return Slots(params, states, slots.lrs)

    def _write(self, slots: Slots, moved: Slots, count: Tensor) -> None:
        for name, param in moved.params.items():
            slots.params[name].copy_(param)
            for slot, new in zip(slots.states[name], moved.states[name], strict=True):
                slot.copy_(new)
        count.add_(1)

    def _clipped(self, grads: Tensors) -> Tensors:
        if self.options.clip_value is not None:
            bound = self.options.clip_value
            return {name: grad.clamp(-bound, bound) for name, grad in grads.items()}
        if self.options.clip_norm is None:
            return grads
        squares = [g.reshape(len(g), -1).square().sum(1) for g in grads.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (self.options.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        return {n: g * factors.view(-1, *[1] * (g.ndim - 1)) for n, g in grads.items()}


def _corrected(grads: Tensors, slots: Slots) -> Tensors:
    term = slots.term
    if term is None:
        return grads
    for name, start in term.starts.items():
        grads = grads | {name: grads[name] + term.pull * (slots.params[name] - start)}
    return grads | {name: grads[name] + shift for name, shift in term.shifts.items()}
