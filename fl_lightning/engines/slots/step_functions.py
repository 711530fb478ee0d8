"""One local step of G clients as functions of tensors: gradients, optimizer, writes.

From step to step only their tensor arguments change, so each function can be compiled as one graph.
`torch.func` takes the gradient of the user's ``training_step`` under `vmap` over clients, each with its
own parameters and its own batch.

Batches stay whole, and all batches of one call have one size. If the user declares that the loss is a
mean over examples, smaller batches may be padded: the loss is then evaluated example by example (a
second `vmap`, free once compiled) and averaged with weights 0 and 1.

Random numbers (dropout) are inputs like the batch, drawn beforehand from each client's generator. The
inputs of torchmetrics objects are among the outputs.
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
    """Inputs of G clients' local step besides parameters; the first axis of all tensors is over clients.

    Attributes:
        batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
        valid: 1 for an example, 0 for padding, shape (G, B).
        steps: number of steps that each client has taken, float64 of shape (G,).
        draws: random numbers, in the order in which the step draws them.
    """

    batch: Any
    valid: Tensor
    steps: Tensor
    draws: list[Tensor]


class Outputs(NamedTuple):
    """Outputs of G clients' local step besides gradients.

    Attributes:
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        given: inputs of torchmetrics objects.
        buffers: buffers after the step, by name; empty if the loss is evaluated example by example.
    """

    sums: Tensors
    given: list[Tensor]
    buffers: Tensors


class StackedGradients:
    """Computes the gradients of G clients in one call, given their parameters and batches as stacked tensors.

    Args:
        call: training step of the module.
        padded: evaluate the loss example by example.

    Attributes:
        draw_axes: axis of examples of each random draw; None for a draw without this axis.
    """

    def __init__(self, call: TrainingStep, padded: bool) -> None:
        self._call = call
        self._loss = self._padded if padded else self._whole
        self.draw_axes: list[int | None] = []

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Tensors, Outputs]:
        """Compute gradients by name, shape (G, …), and the step's other outputs.

        Args:
            params: parameters by name, shape (G, …).
            buffers: buffers by name, shape (G, …).
            inputs: other inputs of the step.
            shared: True if all clients have the same parameters, given without the client axis.
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
    """Options of the local step that trains G clients at once.

    Attributes:
        num_slots: number of clients that train side by side, G.
        padded: evaluate the loss, a mean over examples, example by example, so that batches can be
            padded. If False, batches stay whole, and their sizes may differ from step to step.
        clip_norm: largest norm of a client's gradient; None for no clipping.
        clip_value: largest absolute value of a gradient's entries; None for no clipping.
        compiled: compile the step as one graph.
        direct: use the C operators of `direct_layers` for layers that support them.
        has_pull: a correction may pull clients back to their initial parameters.
        has_shift: a correction may add a vector to a client's gradients.
        whole_because: reason why batches are not padded although the user declared a mean loss.
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
    """The term pull · (y - x) + shift that a correction adds to each of G clients' gradients.

    Attributes:
        pull: scalar factor of the distance to the initial parameters.
        starts: initial parameters x by name, without the axis of clients; empty without a pull.
        shifts: shifts by name, shape (G, …); empty without shifts.
    """

    pull: Tensor
    starts: Tensors
    shifts: Tensors


class Slots(NamedTuple):
    """Tensors of G clients that their optimizers read and update: parameters, states, learning rates.

    Attributes:
        params: parameters by name, shape (G, …).
        states: optimizer states by name.
        lrs: learning rate of each parameter group, a scalar or one value per local step.
        term: gradient term of a correction; None without a correction.
    """

    params: Tensors
    states: dict[str, list[Tensor]]
    lrs: list[Tensor]
    term: StackedTerm | None = None


@dataclass(eq=False)
class StackedFunctions:
    """The stacked local step as three functions: any step, a client's first step, and a client's only step.

    Attributes:
        gradients: computes the gradients.
        options: options of the stacked step.
        group_of: index of each parameter's group in the optimizer, by name.
        rules: update rule of each parameter group.
        masks: masks of parameters with frozen entries, by name; True for entries that train.
        unused: names of parameters that the loss does not depend on. They have no gradient (rather
            than a gradient of 0), so the optimizer skips them.
    """

    gradients: StackedGradients
    options: StackedOptions
    group_of: Mapping[str, int]
    rules: list[StackedRule] = field(default_factory=list)
    masks: Tensors = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    def step(self, inputs: Inputs, slots: Slots, buffers: Tensors) -> Outputs:
        """Train the client in every slot for one step, and update the slots in place."""
        grads, outputs = self._gradients(slots.params, buffers, inputs)
        self._write(slots, self._moved(slots, grads, inputs.steps), inputs.steps)
        for name, buffer in buffers.items():
            buffer.copy_(outputs.buffers[name])
        return Outputs(outputs.sums, outputs.given, {})

    def first(self, inputs: Inputs, start: Tensors, slots: Slots) -> Outputs:
        """Train a new client in every slot for its first step; all start from the same parameters."""
        moved, outputs = self._moved_from(start, slots, inputs)
        self._write(slots, moved, inputs.steps)
        return outputs

    def only(
        self, inputs: Inputs, start: Tensors, slots: Slots, active: Tensors
    ) -> tuple[Outputs, Tensor]:
        """Return the deltas, shape (G, k), of new clients after one step, without changing the slots.

        ``active`` has the indices of the delta's entries, for parameters with frozen entries.
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
        """Return new clients' parameters and optimizer states after their first step, and the step's outputs."""
        grads, outputs = self._gradients(start, {}, inputs, shared=True)
        params = {name: value.unsqueeze(0) for name, value in start.items()}
        states = {
            name: [torch.zeros_like(grad) for _ in slots.states[name]]
            for name, grad in grads.items()
        }
        fresh = Slots(params, states, slots.lrs, slots.term)
        return self._moved(fresh, grads, inputs.steps), outputs

    def _moved(self, slots: Slots, grads: Tensors, count: Tensor) -> Slots:
        """Return parameters and optimizer states after a step; parameters without a gradient are left out."""
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
