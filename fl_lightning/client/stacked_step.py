"""One local step of G clients at once: forward, backward and optimizer as one function of tensors.

    (params, state) of shape (G, …), batches (G, B, …)  ->  updated in place

Fixed shapes and no Python between the operators let the compiler turn the whole step into one
graph, which is where the speed comes from. The gradients are `StackedGradients`'. Those of thin layers
come out of the graph as factors, and `ThinSteps` follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.compiling import Compiled
from fl_lightning.client.direct_linear import FEW
from fl_lightning.client.functional_step import Tensors, TrainingStep, map_tensors, tensors_in
from fl_lightning.client.rehearsal import Rehearsal, rehearse
from fl_lightning.client.stacked_gradients import Inputs, Outputs, StackedGradients
from fl_lightning.client.stacked_optimizers import StackedRule, stacked_rule
from fl_lightning.client.stacked_options import StackedOptions
from fl_lightning.client.thin_steps import Factors, ThinSteps, can_be_thin
from fl_lightning.sparsity.masked_optimizer import MaskedOptimizer

# Compiled anew for changed momentum, weight decay, …; beyond, the step runs as it is.
MOST_GRAPHS = 3

_T = TypeVar("_T")


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
        self._run: dict[str, Callable[..., Any]] = {}
        self.read_options()

    def read_options(self) -> None:
        """Take over the optimizer's present options and masks."""
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
        if rules != self._rules:
            self._rules = [rule for rule in rules if rule is not None]
            self.states = {
                name: [torch.zeros_like(self.params[name]) for _ in range(rule.num_states)]
                for name, rule in self._by_name(self._rules).items()
            }
            self._run = {}

    def _read_step(self, batch: Callable[[], Any]) -> None:
        """Find out which layers can be thin now, and renew the graphs if something has changed."""
        thin = self._thin_names(batch)
        if self._run and thin == self._gradients.thin:
            for graph in self._graphs:
                graph.recheck()
        else:
            # a schedule that changes more than the learning rate would want a graph every round
            self._num_graphs += 1
            self._graphs, self._gradients.thin = [], thin
            functions = self._step, self._first_step, self._only_step
            self._run = {function.__name__: self._graph(function) for function in functions}
        rules, lrs = self._by_name(self._rules), self._by_name(self._lrs)
        self._thin = ThinSteps(self.params, self.states, rules, lrs)

    def _thin_names(self, batch: Callable[[], Any]) -> list[str]:
        """Return the names of the weights whose layers can be thin."""
        layers = self._call.thin_layers
        if layers is None or self.options.changes_gradients:
            return []
        names = [name for name in layers.names if name not in self.masks]
        names = can_be_thin(names, self._by_name(self._rules))
        sample = batch() if names else torch.empty(FEW + 1)
        if len(tensors_in(sample)[0]) > FEW:
            return []
        if self.options.weighted:
            sample = map_tensors(lambda tensor: tensor[:1], sample)
        with self._call.in_place():
            return self._call.thin_here(names, sample, self.count[0])

    def _by_name(self, of_groups: Sequence[_T]) -> dict[str, _T]:
        return {name: of_groups[group] for name, group in self._group_of.items()}

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

        It may change from round to round, e.g. with a dropout that grows, and so may all else that
        Python reads in a step: some changes need another graph.

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
        self._read_step(batch)
        return self.rehearsal

    def __call__(self, batch: Any, valid: Tensor) -> None:
        """Take one step in every slot.

        Args:
            batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
            valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        """
        inputs = self._inputs(batch, valid)
        outputs, factors = self._done("_step", self._slots, self.buffers, inputs)
        self._thin.step(factors)
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
        inputs = self._inputs(batch, valid)
        outputs, factors = self._done("_first_step", start, self._slots, inputs)
        self._thin.first(start, factors)
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
        outputs, factors, deltas = self._done("_only_step", start, self._slots, inputs, active)
        if factors:
            deltas = self._thin.deltas(deltas, start, factors, active)
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

    def _done(self, function: str, *arguments: Any) -> Any:
        """Run a step, or a graph of it, and keep what it gives to metrics."""
        with self._call.in_place():
            result = self._run[function](*arguments)
        self.given = result[0].given
        return result

    def _add(self, logged: Tensors) -> None:
        for name, sums in logged.items():
            if name in self.sums:
                self.sums[name] += sums
            else:
                self.sums[name] = sums

    def _step(
        self, slots: Slots, buffers: Tensors, inputs: Inputs
    ) -> tuple[Outputs, dict[str, Factors]]:
        grads, outputs, factors = self._whole_and_thin(slots.params, buffers, inputs)
        self._write(slots, self._moved(slots, grads, inputs.steps), inputs.steps)
        for name, buffer in buffers.items():
            buffer.copy_(outputs.buffers[name])
        return Outputs(outputs.sums, outputs.given, {}, {}), factors

    def _first_step(
        self, start: Tensors, slots: Slots, inputs: Inputs
    ) -> tuple[Outputs, dict[str, Factors]]:
        moved, outputs, factors = self._moved_from(start, slots, inputs)
        self._write(slots, moved, inputs.steps)
        return outputs, factors

    def _only_step(
        self, start: Tensors, slots: Slots, inputs: Inputs, active: Tensors
    ) -> tuple[Outputs, dict[str, Factors], Tensor]:
        """Return also the deltas, without those of thin layers' weights."""
        moved, outputs, factors = self._moved_from(start, slots, inputs)
        count = self.options.num_slots  # not flatten(1): a parameter may be a scalar
        deltas = {n: (start[n] - end).reshape(count, -1) for n, end in moved.params.items()}
        for name, index in active.items():
            deltas[name] = deltas[name][:, index]
        none = inputs.valid.new_empty(count, 0)
        return outputs, factors, torch.cat([*deltas.values(), none], 1)

    def _whole_and_thin(
        self, params: Tensors, buffers: Tensors, inputs: Inputs, *, shared: bool = False
    ) -> tuple[Tensors, Outputs, dict[str, Factors]]:
        grads, outputs = self._gradients(params, buffers, inputs, shared=shared)
        factors = {n: Factors(error, outputs.inputs[n]) for n, error in grads.errors.items()}
        return grads.whole, Outputs(*outputs[:3], {}), factors

    def _moved_from(
        self, start: Tensors, slots: Slots, inputs: Inputs
    ) -> tuple[Slots, Outputs, dict[str, Factors]]:
        """Return the slots after the first step of new clients, and what came out of it."""
        grads, outputs, factors = self._whole_and_thin(start, {}, inputs, shared=True)
        params = {name: value.unsqueeze(0) for name, value in start.items()}
        states = {
            name: [torch.zeros_like(grad) for _ in slots.states[name]]
            for name, grad in grads.items()
        }
        fresh = Slots(params, states, slots.lrs, slots.term)
        return self._moved(fresh, grads, inputs.steps), outputs, factors

    def _moved(self, slots: Slots, grads: Tensors, count: Tensor) -> Slots:
        """Return what has a gradient after the optimizer's step."""
        grads = self._clipped(_corrected(grads, slots))
        params, states = {}, {}
        for name, grad in grads.items():
            group, param = self._group_of[name], slots.params[name]
            params[name], states[name] = self._rules[group].step(
                param, grad, slots.states[name], slots.lrs[group], count
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
