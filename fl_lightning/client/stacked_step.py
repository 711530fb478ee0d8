"""One local step of G clients at once: forward, backward and optimizer as one function of tensors.

    (params, state) of shape (G, …), batches (G, B, …)  ->  updated in place

Fixed shapes and no Python between the operators let the compiler turn the whole step into one
graph, which is where the speed comes from. The gradients are `StackedGradients`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.compiling import Compiled
from fl_lightning.client.functional_step import Tensors, TrainingStep
from fl_lightning.client.rehearsal import Rehearsal, rehearse
from fl_lightning.client.stacked_gradients import Inputs, Outputs, StackedGradients
from fl_lightning.client.stacked_optimizers import StackedRule, stacked_rule
from fl_lightning.sparsity.masked_optimizer import MaskedOptimizer

# Compiled anew for changed momentum, weight decay, …; beyond, the step runs as it is.
MOST_GRAPHS = 3


@dataclass(frozen=True)
class StackedOptions:
    """How a local step is stacked.

    Attributes:
        num_slots: clients side by side, G.
        weighted: evaluate the loss by example, so that batches may be padded.
        clip_norm: largest norm of a client's gradient; None for no clipping.
        clip_value: largest absolute value of a gradient's numbers; None for no clipping.
        compiled: have the compiler turn the step into one graph.
        direct: have layers computed by `direct_layers`, where that is possible.
        has_pull: clients may be pulled back to where they began.
        has_shift: a vector may be added to a client's gradients.
    """

    num_slots: int
    weighted: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    compiled: bool = False
    direct: bool = False
    has_pull: bool = False
    has_shift: bool = False


class StackedTerm(NamedTuple):
    """What is added to the gradients: pull · (y - x) + shift.

    Attributes:
        pull: a scalar.
        starts: x by name, without the axis of clients; empty where nothing pulls.
        shifts: by name, shape (G, …); empty where there are none.
    """

    pull: Tensor
    starts: Tensors
    shifts: Tensors


class Slots(NamedTuple):
    """What a client's optimizer has and reads.

    Attributes:
        params: by name, shape (G, …).
        states: of the optimizer, by name.
        lrs: learning rates of its parameter groups.
        term: of a correction; None where there is none.
    """

    params: Tensors
    states: dict[str, list[Tensor]]
    lrs: list[Tensor]
    term: StackedTerm | None = None


class StackedStep:
    """Parameters, optimizer state and sums of G clients, and the step that moves them.

    Args:
        module: the LightningModule; its parameters are read, never written.
        optimizer: over all parameters that train; its options and masks are read before every
            round.
        takes_index: whether ``training_step`` has a second parameter.
        options: how to stack.

    Raises:
        CannotStack: if the optimizer has no rule or leaves out a parameter that trains.

    Attributes:
        params: by name, shape (G, …).
        states: of the optimizer, by name.
        masks: ``True`` where an entry may move, of parameters with frozen entries, by name.
        buffers: floating-point buffers by name, shape (G, …); empty if ``weighted``.
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        shifts: of a correction, by name, shape (G, …); empty where there are none.
        count: steps that each client has taken, float64 of shape (G,).
        rehearsal: what the step draws and gives to metrics; None before `rehearse`.
        given: what the last step gave to metrics.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, takes_index: bool, options: StackedOptions
    ) -> None:
        self.options = options
        self._call = TrainingStep(module, takes_index, direct=options.direct)
        self._gradients = StackedGradients(self._call, options.weighted)
        self._module = module
        self.rehearsal: Rehearsal | None = None
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        self._trained = trained
        self._group_of = _groups(optimizer, trained)
        self._rules: list[StackedRule] = []
        self._num_graphs = 0
        first = next(iter(trained.values()))
        self._device, self._dtype = first.device, first.dtype
        self.params = {name: self._stacked(p.detach()) for name, p in trained.items()}
        self.shifts = (
            {name: torch.zeros_like(p) for name, p in self.params.items()}
            if options.has_shift
            else {}
        )
        self._pull = torch.zeros((), dtype=self._dtype, device=self._device)
        self._starts: Tensors = {}
        stacked_buffers = {} if options.weighted else dict(module.named_buffers())
        self.buffers = {n: self._stacked(b) for n, b in stacked_buffers.items()}
        self.count = torch.zeros(options.num_slots, device=self._device, dtype=torch.float64)
        self.sums: Tensors = {}
        self.given: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {}
        self._graphs: list[Compiled] = []
        self.read_options()

    def read_options(self) -> None:
        """Take over the optimizer's present options and masks; some need another graph.

        What else Python reads in a step may have changed as well, since the last time.
        """
        groups = self._optimizer.param_groups
        rules = [stacked_rule(self._optimizer, group) for group in groups]
        if any(rule is None for rule in rules):
            raise CannotStack(f"there is no stacked form of {type(self._optimizer).__name__}")
        # tensors, because a changed number would mean another graph
        self._lrs = [
            torch.tensor(float(g["lr"]), dtype=self._dtype, device=self._device) for g in groups
        ]
        masks = self._optimizer.masks if isinstance(self._optimizer, MaskedOptimizer) else {}
        self.masks = {name: masks[p] for name, p in self._trained.items() if p in masks}
        if rules == self._rules:
            for graph in self._graphs:
                graph.recheck()
            return
        self._rules = [rule for rule in rules if rule is not None]
        self.states = {
            name: [torch.zeros_like(p) for _ in range(self._rules[self._group_of[name]].num_states)]
            for name, p in self.params.items()
        }
        # a schedule that changes more than the learning rate would want a graph every round
        self._num_graphs += 1
        self._graphs = []
        self._run, self._run_first = self._graph(self._step), self._graph(self._first_step)
        self._run_only = self._graph(self._only_step)

    def pull_to(self, starts: Tensors, pull: float) -> None:
        """Pull all clients back to parameters, by name, without the axis of clients."""
        self._starts = starts
        self._pull.fill_(pull)

    def _graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.options.compiled or self._num_graphs > MOST_GRAPHS:
            return function
        self._graphs.append(Compiled(function))
        return self._graphs[-1]

    def rehearse(self, batch: Callable[[], Any]) -> Rehearsal:
        """Find out what the step draws and gives to metrics, if that is not known for good.

        It may change from round to round, e.g. with a dropout that grows.

        Args:
            batch: makes a full one.
        """
        if self.rehearsal is None or not self.rehearsal.is_final:
            options = self.options
            self.rehearsal = rehearse(
                self._call,
                self._module,
                batch(),
                num_slots=options.num_slots,
                by_example=options.weighted,
            )
            self._gradients.draw_axes = self.rehearsal.draws.axes
        return self.rehearsal

    def __call__(self, batch: Any, valid: Tensor) -> None:
        """Take one step in every slot.

        Args:
            batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
            valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        """
        outputs = self._done(self._run, self._slots, self.buffers, self._inputs(batch, valid))
        self._add(outputs.sums)

    def first(self, start: Tensors, batch: Any, valid: Tensor) -> None:
        """Begin with a new client in every slot and take its first step.

        All clients start from the same parameters, so the forward pass is that of one model on
        all batches: cheaper than a reset and a step.

        Args:
            start: parameters by name, without the axis of clients.
            batch: as for a step.
            valid: as for a step.
        """
        torch._foreach_zero_([self.count, *self.sums.values()])
        outputs = self._done(self._run_first, start, self._slots, self._inputs(batch, valid))
        self._add(outputs.sums)

    def only(
        self, start: Tensors, batch: Any, valid: Tensor, active: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Return what the only step of a new client in every slot comes to.

        Args:
            start: as for the first step; its order is that of the deltas' coordinates.
            batch: as for a step.
            valid: as for a step.
            active: of parameters whose deltas have only some entries, which, as indices.

        Returns:
            The clients' deltas, shape (G, k), and what `sums` would hold.
        """
        self.count.zero_()
        inputs = self._inputs(batch, valid)
        outputs, deltas = self._done(self._run_only, start, self._slots, inputs, active)
        return deltas, outputs.sums

    @property
    def _slots(self) -> Slots:
        options, term = self.options, None
        if options.has_pull or options.has_shift:
            term = StackedTerm(self._pull, self._starts if options.has_pull else {}, self.shifts)
        return Slots(self.params, self.states, self._lrs, term)

    def _inputs(self, batch: Any, valid: Tensor) -> Inputs:
        draws = [] if self.rehearsal is None else self.rehearsal.draws.numbers
        return Inputs(batch, valid, self.count, draws)

    def _done(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step and keep what it gives to metrics."""
        with self._call.in_place():
            result = run(*arguments)
        self.given = (result if isinstance(result, Outputs) else result[0]).given
        return result

    def _add(self, logged: Tensors) -> None:
        for name, sums in logged.items():
            if name in self.sums:
                self.sums[name] += sums
            else:
                self.sums[name] = sums

    def _step(self, slots: Slots, buffers: Tensors, inputs: Inputs) -> Outputs:
        grads, outputs = self._gradients(slots.params, buffers, inputs)
        self._write(slots, self._moved(slots, grads, inputs.steps), inputs.steps)
        for name, buffer in buffers.items():
            buffer.copy_(outputs.buffers[name])
        return Outputs(outputs.sums, outputs.given, {})

    def _first_step(self, start: Tensors, slots: Slots, inputs: Inputs) -> Outputs:
        moved, outputs = self._moved_from(start, slots, inputs)
        self._write(slots, moved, inputs.steps)
        return outputs

    def _only_step(
        self, start: Tensors, slots: Slots, inputs: Inputs, active: Tensors
    ) -> tuple[Outputs, Tensor]:
        moved, outputs = self._moved_from(start, slots, inputs)
        count = self.options.num_slots  # not flatten(1): a parameter may be a scalar
        deltas = {n: (start[n] - moved.params[n]).reshape(count, -1) for n in start}
        for name, index in active.items():
            deltas[name] = deltas[name][:, index]
        return outputs, torch.cat(list(deltas.values()), 1)

    def _moved_from(self, start: Tensors, slots: Slots, inputs: Inputs) -> tuple[Slots, Outputs]:
        """Return the slots after the first step of new clients, and what came out of it."""
        grads, outputs = self._gradients(start, {}, inputs, shared=True)
        params = {name: value.unsqueeze(0) for name, value in start.items()}
        states = {
            name: [torch.zeros_like(grads[name]) for _ in state]
            for name, state in slots.states.items()
        }
        fresh = Slots(params, states, slots.lrs, slots.term)
        return self._moved(fresh, grads, inputs.steps), outputs

    def _moved(self, slots: Slots, grads: Tensors, count: Tensor) -> Slots:
        """Return the slots after the optimizer's step."""
        grads = self._clipped(_corrected(grads, slots))
        params, states = {}, {}
        for name, param in slots.params.items():
            group = self._group_of[name]
            params[name], states[name] = self._rules[group].step(
                param, grads[name], slots.states[name], slots.lrs[group], count
            )
            if name in self.masks:
                params[name] = torch.where(self.masks[name], params[name], param)
        return Slots(params, states, slots.lrs)

    def _write(self, slots: Slots, moved: Slots, count: Tensor) -> None:
        for name, param in slots.params.items():
            param.copy_(moved.params[name])
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

    def _stacked(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).repeat(self.options.num_slots, *[1] * tensor.ndim)


def _corrected(grads: Tensors, slots: Slots) -> Tensors:
    term = slots.term
    if term is None:
        return grads
    for name, start in term.starts.items():
        grads = grads | {name: grads[name] + term.pull * (slots.params[name] - start)}
    return grads | {name: grads[name] + shift for name, shift in term.shifts.items()}


def _groups(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the parameter group that each name is in."""
    numbers = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    missing = [name for name, p in trained.items() if id(p) not in numbers]
    if missing:
        raise CannotStack(f"its optimizer leaves out the parameter {missing[0]}, which trains")
    return {name: numbers[id(p)] for name, p in trained.items()}
