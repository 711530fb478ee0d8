"""One local step of G clients at once: forward, backward and optimizer as one graph.

    (params, state) of shape (G, …), batches (G, B, …)  ->  updated in place

Fixed shapes and no Python between the operators let the compiler turn the whole step, which
`StackedFunctions` has, into one graph: that is where the speed comes from. The gradients of thin layers
come out of it as factors, and `ThinSteps` follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.state.python_state import PythonState
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.core.update import LazyDeltas
from fl_lightning.engines.cannot_stack import CannotStack, NotByExample
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.engines.functional.functional_step import (
    StepContext,
    Tensors,
    TrainingStep,
    map_tensors,
    tensors_in,
)
from fl_lightning.engines.functional.user_hooks import hooks_against_slots
from fl_lightning.engines.slots.rehearsal import Rehearsal, rehearse
from fl_lightning.engines.slots.stacked_functions import Slots, StackedFunctions, StackedTerm
from fl_lightning.engines.slots.stacked_gradients import Inputs, StackedGradients
from fl_lightning.engines.slots.stacked_optimizers import stacked_rule
from fl_lightning.engines.slots.stacked_options import StackedOptions
from fl_lightning.engines.slots.step_records import BatchOf, StepRecords
from fl_lightning.engines.slots.thin_steps import ThinSteps, can_be_thin
from fl_lightning.kernels import FEW
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

# Compiled anew for changed momentum, weight decay, …; beyond, the step runs as it is.
MOST_GRAPHS = 3
# Of batches, by types and shapes, that a run may have.
MOST_KINDS = 4

_T = TypeVar("_T")
_Kind = Literal["step", "first", "only"]


class _Graphs(NamedTuple):
    step: Callable[..., Any]
    first: Callable[..., Any]
    only: Callable[..., Any]


class StackedStep:
    """Parameters, optimizer state and sums of G clients, and the step that moves them.

    Args:
        module: the LightningModule; its parameters are read, never written.
        optimizer: over all parameters that train; its options and masks are read before every
            round.
        takes_index: whether ``training_step`` has a second parameter.
        options: how to stack.
        context: makes what ``training_step`` runs in, such as autocast.
        ignore: names of the module's attributes that are none of the user's, see `PythonState`.

    Raises:
        CannotStack: if the optimizer has no rule or leaves out a parameter that trains.

    Attributes:
        params: by name, shape (G, …).
        states: of the optimizer, by name.
        buffers: floating-point buffers by name, shape (G, …); empty if ``weighted``.
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        shifts: of a correction, by name, shape (G, …); empty where there are none.
        count: steps that each client has taken, float64 of shape (G,).
        rehearsal: what the step draws and gives to metrics; None before `rehearse`.
        given: what the last step gave to metrics.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        takes_index: bool,
        options: StackedOptions,
        context: StepContext = nullcontext,
        ignore: Collection[str] = (),
    ) -> None:
        self.options = options
        self._call = TrainingStep(module, takes_index, direct=options.direct, context=context)
        self._plain_call = TrainingStep(module, takes_index, context=context)
        self._module, self._ignore = module, ignore
        self._records: StepRecords | None = None
        self.rehearsal: Rehearsal | None = None
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        self._trained = trained
        self._functions = StackedFunctions(
            StackedGradients(self._call, options.weighted), options, _groups(optimizer, trained)
        )
        first = next(iter(trained.values()))
        self._device, self._dtype = first.device, first.dtype
        self.params = {name: self._stacked(p.detach()) for name, p in trained.items()}
        self.shifts = (
            {name: torch.zeros_like(p) for name, p in self.params.items()}
            if options.has_shift
            else {}
        )
        self._pull = torch.zeros((), dtype=self._dtype, device=self._device)
        self._lrs: list[Tensor] = []
        self._starts: Tensors = {}
        stacked_buffers = {} if options.weighted else dict(module.named_buffers())
        self.buffers = {n: self._stacked(b) for n, b in stacked_buffers.items()}
        self.count = torch.zeros(options.num_slots, device=self._device, dtype=torch.float64)
        self.sums: Tensors = {}
        self.given: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {}
        # by what needs one of its own: the optimizer's rules and thin layers' names
        self._graphs: dict[Any, _Graphs] = {}
        self._looked_for: Any = None  # in no round so far
        self._kinds: set[Any] = set()
        self._sizes: Collection[int] = ()
        self.read_options()

    @property
    def is_compiled(self) -> bool:
        """Whether its graphs, as far as they were needed, are compiled; not before the first round."""
        return all(isinstance(run, Compiled) and not run.is_given_up for run in self._run)

    def read_options(self) -> None:
        """Take over the optimizer's present options and masks, before the round's `rehearse`."""
        groups = self._optimizer.param_groups
        rules = [stacked_rule(self._optimizer, group) for group in groups]
        if any(rule is None for rule in rules):
            raise CannotStack(f"there is no stacked form of {type(self._optimizer).__name__}")
        if len(self._lrs) != len(groups):
            # tensors, because a changed number would mean another graph
            self._lrs = [torch.zeros_like(self._pull) for _ in groups]
        for lr, group in zip(self._lrs, groups, strict=True):
            lr.fill_(float(group["lr"]))
        masks = self._optimizer.masks if isinstance(self._optimizer, MaskedOptimizer) else {}
        self._functions.masks = {name: masks[p] for name, p in self._trained.items() if p in masks}
        if rules != self._functions.rules:
            self._functions.rules = [rule for rule in rules if rule is not None]
            self.states = {
                name: [torch.zeros_like(self.params[name]) for _ in range(rule.num_states)]
                for name, rule in self._by_name(self._functions.rules).items()
            }

    def _is_known(self, sizes: Collection[int]) -> bool:
        """Whether the step is not run to rehearse it: nothing about it is open."""
        is_settled = self.rehearsal is not None and self.rehearsal.is_final
        return is_settled and self._graphs_can_tell and not self._are_new(sizes)

    @property
    def _graphs_can_tell(self) -> bool:
        """Whether graphs of the present rules and masks tell if what Python reads has changed."""
        functions = self._functions
        is_known = self._looked_for == (functions.rules, set(functions.masks))
        return is_known and self.is_compiled

    def _are_new(self, sizes: Collection[int]) -> bool:
        """Whether nothing is proved yet of batches of one of these sizes."""
        if not self.options.weighted or self._records is None:
            return False
        return not self._records.has_proved(sizes)

    def _read_step(self, batch: BatchOf, sizes: Collection[int]) -> None:
        """Prepare for a step that may have changed.

        Graphs tell whether what Python reads in the step has. They do not read rules and masks of
        weights that are thin.
        """
        functions, can_tell = self._functions, self._graphs_can_tell
        if not can_tell:
            self._look(batch, max(sizes))
            with preserve_global_generators():
                self._kinds = {_kind(batch(max(sizes)), 1)}
        self._prove(sizes)
        self._recheck(refuse=can_tell)
        rules, lrs = self._by_name(functions.rules), self._by_name(self._lrs)
        self._thin = ThinSteps(self.params, self.states, rules, lrs)

    def _look(self, batch: BatchOf, full: int) -> None:
        """Find out what the step does now, which layers can be thin, and take the graphs for that."""
        functions = self._functions
        self._records = StepRecords(self._plain_call, self._module, batch, full)
        self._records.look()
        functions.unused = self._records.unused
        if functions.unused and (self.options.has_pull or self.options.has_shift):
            name = min(functions.unused)
            raise CannotStack(
                f"a correction moves the parameter {name}, which its loss does not use"
            )
        with preserve_global_generators():
            functions.gradients.thin = self._thin_names(batch, full)
        key = (*functions.rules, *functions.gradients.thin, functions.unused)
        if key not in self._graphs:
            step, first = self._graph(functions.step), self._graph(functions.first)
            self._graphs[key] = _Graphs(step, first, self._graph(functions.only))
        self._run = self._graphs[key]
        self._looked_for = functions.rules, set(functions.masks)

    def _prove(self, sizes: Collection[int]) -> None:
        """Have it proved that batches of these sizes can be evaluated example by example."""
        if not self.options.weighted or self._records is None:
            return
        if reason := self._records.reason_against(sizes):
            raise NotByExample(reason)

    def _recheck(self, *, refuse: bool) -> None:
        for run in self._run:
            if isinstance(run, Compiled):
                run.recheck(refuse=refuse)

    def _thin_names(self, batch: BatchOf, full: int) -> list[str]:
        """Return the names of the weights whose layers can be thin."""
        layers = self._call.thin_layers
        if layers is None or self.options.changes_gradients:
            return []
        names = [name for name in layers.names if name not in self._functions.masks]
        names = can_be_thin(names, self._by_name(self._functions.rules))
        if not names:
            return []
        if full > FEW:
            return []
        sample = batch(full)
        if self.options.weighted:
            sample = map_tensors(lambda tensor: tensor[:1], sample)
        with self._call.in_place():
            return self._call.thin_here(names, sample, self.count[0])

    def _by_name(self, of_groups: Sequence[_T]) -> dict[str, _T]:
        return {name: of_groups[group] for name, group in self._functions.group_of.items()}

    def pull_to(self, starts: Tensors, pull: float) -> None:
        """Pull all clients back to parameters, by name, without the axis of clients."""
        self._starts = starts
        self._pull.fill_(pull)

    def _graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # a schedule that changes more than the learning rate would want a graph every round
        is_compiled = self.options.compiled and len(self._graphs) < MOST_GRAPHS
        return Compiled(function, is_alone=True) if is_compiled else function

    def rehearse(self, batch: BatchOf, sizes: Collection[int]) -> Rehearsal:
        """Find out what the step draws and gives to metrics, if that is not known for good.

        It may change from round to round, e.g. with a dropout that grows, and so may all else that
        Python reads in a step: some changes need another graph.

        Args:
            batch: makes one of so many examples.
            sizes: that batches have; the largest is a full one's.

        Raises:
            CannotStack: if slots cannot do what the step does now.
        """
        if reason := hooks_against_slots(self._module, self._optimizer):
            raise CannotStack(reason)
        with nullcontext() if self._is_known(sizes) else self._leaving_nothing():
            if self.rehearsal is None or not self.rehearsal.is_final:
                options = self.options
                with preserve_global_generators():  # reading it may draw
                    full = batch(max(sizes))
                with preserve_global_generators(only_torch=True):  # others are Python's state
                    self.rehearsal = rehearse(
                        self._call,
                        self._module,
                        full,
                        num_slots=options.num_slots,
                        by_example=options.weighted,
                    )
                self._functions.gradients.draw_axes = self.rehearsal.draws.axes
            self._sizes = sizes
            self._read_step(batch, sizes)
        return self.rehearsal

    def forget(self) -> None:
        """Have the next rehearsal find out everything anew."""
        self.rehearsal = self._looked_for = None

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Undo what the step does to Python's objects; refuse a step that does anything to them."""
        state, reason = PythonState(self._module, ignore=self._ignore), None
        try:
            yield
        except CannotStack as found:
            reason = found
        finally:
            changes = state.changes()
            if changes:
                state.put_back()
        if changes:  # which is why it does other things the next time
            raise CannotStack(f"training_step changes {changes[0]}")
        if reason is not None:
            raise reason

    @property
    def written(self) -> frozenset[str]:
        """Names of buffers that the step was seen to write to."""
        return frozenset() if self._records is None else self._records.written

    @property
    def is_unused_any(self) -> bool:
        """Whether a parameter that trains is not among what the loss depends on."""
        return bool(self._functions.unused)

    def __call__(self, batch: Any, valid: Tensor) -> None:
        """Take one step in every slot.

        Args:
            batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
            valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        """
        inputs = self._inputs(batch, valid)
        outputs, factors = self._done("step", inputs, self._slots, self.buffers)
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
        outputs, factors = self._done("first", inputs, start, self._slots)
        self._thin.first(start, factors)
        self._add(outputs.sums)

    def only(
        self, start: Tensors, batch: Any, valid: Tensor, active: Tensors
    ) -> tuple[Tensor | LazyDeltas, Tensors]:
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
        outputs, factors, deltas = self._done("only", inputs, start, self._slots, active)
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

    def _done(self, kind: _Kind, inputs: Inputs, *arguments: Any) -> Any:
        """Run a kind of step, or a graph of it, and keep what it gives to metrics."""
        self._meet(inputs)
        result = self._run_in_place(kind, inputs, *arguments)
        self.given = result[0].given
        return result

    def _meet(self, inputs: Inputs) -> None:
        """See to it that the step is known for batches of this kind: types, and shapes of examples."""
        kind = _kind(inputs.batch, 2)
        if kind in self._kinds:
            return
        if len(self._kinds) == MOST_KINDS or inputs.draws:
            raise CannotStack("its batches have examples of different shapes or types")
        with self._leaving_nothing():
            self._look(
                lambda size: map_tensors(lambda tensor: tensor[0][:size], inputs.batch),
                inputs.valid.shape[1],
            )
            self._prove(self._sizes)
        self._kinds.add(kind)
        self._recheck(refuse=False)

    def _run_in_place(self, kind: _Kind, *arguments: Any) -> Any:
        with self._call.in_place():
            return getattr(self._run, kind)(*arguments)

    def _add(self, logged: Tensors) -> None:
        for name, sums in logged.items():
            if name in self.sums:
                self.sums[name] += sums
            else:
                self.sums[name] = sums

    def _stacked(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).repeat(self.options.num_slots, *[1] * tensor.ndim)


def _kind(batch: Any, num_axes: int) -> Any:
    """Return what tells batches apart in which a step may do other things."""
    return tuple((tensor.dtype, tensor.shape[num_axes:]) for tensor in tensors_in(batch))


def _groups(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the parameter group that each name is in."""
    numbers = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    missing = [name for name, p in trained.items() if id(p) not in numbers]
    if missing:
        raise CannotStack(f"its optimizer leaves out the parameter {missing[0]}, which trains")
    return {name: numbers[id(p)] for name, p in trained.items()}
