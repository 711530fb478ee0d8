"""Compiled graphs of a step of G clients, and the rehearsal of the step before each round.

A graph holds for an optimizer's rules, for the types and shapes of batches, and for the Python values that
the step reads. A compiled graph detects a change of these values; an uncompiled step is rehearsed again in
every round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.state.attributes import Attributes
from fl_lightning.client.state.round_start import copied_options
from fl_lightning.client.state.tensors import same_value
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.engines.functional import CannotPad, CannotStack
from fl_lightning.engines.functional.functional_step import (
    StepContext,
    TrainingStep,
    map_tensors,
    tensors_in,
)
from fl_lightning.engines.slots.step_facts import (
    BatchOf,
    Rehearsal,
    StepFacts,
    hooks_against_slots,
    rehearse,
)
from fl_lightning.engines.slots.step_functions import (
    Inputs,
    StackedFunctions,
    StackedGradients,
    StackedOptions,
)

# Largest number of graphs for different momentum, weight decay, …; with others the step runs uncompiled.
MOST_GRAPHS = 3
# Largest number of combinations of types and shapes that the batches of a run may have.
MOST_KINDS = 4
# Number of batch sizes whose step is compiled: the full size and one more.
MOST_SIZES = 2

_T = TypeVar("_T")
StepKind = Literal["step", "first", "only"]


class _Graphs(NamedTuple):
    step: Callable[..., Any]
    first: Callable[..., Any]
    only: Callable[..., Any]


class StepGraphs:
    """Compiled versions of the stacked local step, and the observations of the step on which they depend.

    Args:
        module: the LightningModule.
        optimizer: optimizer of all trainable parameters.
        takes_index: whether ``training_step`` has a second parameter.
        options: options of the stacked step.
        count: steps that each client has taken, shape (G,).
        context: makes the context manager in which ``training_step`` runs, such as autocast.
        ignore: names of attributes that Lightning sets on the module, see `Attributes`.

    Raises:
        CannotStack: if the optimizer leaves out a trainable parameter.

    Attributes:
        functions: functions that the graphs are compiled from.
        rehearsals: findings of the rehearsal by batch size, the full size first; empty before
            `rehearse`. Smaller sizes are included only if the step draws numbers or updates metrics.
        written: names of buffers that the step writes to.
        present: graphs for the current step; set by the first rehearsal.
    """

    present: _Graphs

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        takes_index: bool,
        options: StackedOptions,
        count: Tensor,
        context: StepContext,
        ignore: Collection[str],
    ) -> None:
        self._module, self._optimizer, self._options = module, optimizer, options
        self._count, self._ignore = count, ignore
        self._call = TrainingStep(module, takes_index, direct=options.direct, context=context)
        self._plain_call = TrainingStep(module, takes_index, context=context)
        gradients = StackedGradients(self._call, options.padded)
        self.functions = StackedFunctions(gradients, options, _groups(optimizer, module))
        self.rehearsals: dict[int, Rehearsal] = {}
        self.written: frozenset[str] = frozenset()
        self._seen: set[int] = set()  # batch sizes on which the step was observed
        self._compiled_sizes: set[int] = set()
        # by the optimizer's rules and the parameters that the loss does not use
        self._made: dict[Any, _Graphs] = {}
        self._looked_for: Any = None  # in no round so far
        self._kinds: set[Any] = set()

    @property
    def is_compiled(self) -> bool:
        """True if all graphs in use are compiled; only available after the first `rehearse`."""
        return all(isinstance(run, Compiled) and not run.is_given_up for run in self.present)

    def rehearse(self, batch: BatchOf, sizes: Collection[int]) -> Rehearsal:
        """Observe the training step before a round by a trial run, unless a compiled graph would detect any change.

        The step's draws, its metrics and the Python values that it reads may change from round to round,
        e.g. with a growing dropout.

        Args:
            batch: builds a batch of a given number of examples.
            sizes: batch sizes of the round; the largest is the full size.

        Raises:
            CannotStack: if slots do not support the step.
        """
        if reason := hooks_against_slots(self._module, self._optimizer):
            raise CannotStack(reason)
        # padded batches all have the full size
        sizes = sorted({max(sizes)} if self._options.padded else {*sizes}, reverse=True)
        # a round begins with full batches in a graph, which detects changes of the step; steps on
        # smaller batches may run without a graph
        self._seen &= {sizes[0]}
        with nullcontext() if self._is_known(sizes) else self._leaving_nothing():
            self._rehearse_sizes(batch, sizes)
            self._read_step(batch, sizes)
        return self.rehearsals[sizes[0]]

    def _rehearse_sizes(self, batch: BatchOf, sizes: Sequence[int]) -> None:
        if self.rehearsals and self.rehearsals[sizes[0]].is_final:
            return
        self.rehearsals = {sizes[0]: self._rehearsed(batch, sizes[0])}
        full = self.rehearsals[sizes[0]]
        self.functions.gradients.draw_axes = full.draws.axes
        if full.draws.numbers or len(full.feed):
            for size in sizes[1:]:
                self.rehearsals[size] = self._rehearsed(batch, size)
                self.rehearsals[size].feed.check_same(full.feed)

    def _rehearsed(self, batch: BatchOf, size: int) -> Rehearsal:
        options = self._options
        with preserve_global_generators():  # reading a batch may draw
            read = batch(size)
        with preserve_global_generators(only_torch=True):  # a draw from the others is refused
            # the plain step, as in sequential training: direct layers draw in another order
            return rehearse(
                self._plain_call,
                self._module,
                read,
                num_slots=options.num_slots,
                by_example=options.padded,
            )

    def forget(self) -> None:
        """Discard all observations of the step, so that the next `rehearse` repeats them."""
        self._looked_for, self.rehearsals = None, {}

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Undo and refuse changes that the step makes to Python objects or optimizer options inside the block.

        Raises:
            CannotStack: if there are any.
        """
        state, reason = Attributes(self._module, ignore=self._ignore, outside=True), None
        groups = self._optimizer.param_groups
        options = [copied_options(group) for group in groups]
        try:
            yield
        except CannotStack as found:
            reason = found
        finally:
            changes = state.changes()
            if changes:
                state.put_back()
            for group, before in zip(groups, options, strict=True):
                changed = [n for n, value in before.items() if not same_value(group.get(n), value)]
                changes += [f"the option {name} of the optimizer" for name in changed]
                group.update({name: before[name] for name in changed})
        if changes:  # also the reason of a CannotStack that says that two runs of the step differ
            raise CannotStack(f"training_step changes {changes[0]}")
        if reason is not None:
            raise reason

    def run(self, kind: StepKind, inputs: Inputs, *arguments: Any) -> Any:
        """Run one kind of step (any, first or only), compiled if possible.

        Raises:
            CannotStack: if batches have too many different types and shapes.
        """
        self._look_at_new_kind(inputs)
        return self._run(getattr(self.present, kind), inputs, *arguments)

    def run_apart(self, inputs: Inputs, *arguments: Any) -> Any:
        """Run a step uncompiled for some clients, whose batches have another size than the others'."""
        return self._run(self.functions.step, inputs, *arguments)

    def _run(self, function: Callable[..., Any], inputs: Inputs, *arguments: Any) -> Any:
        if isinstance(function, Compiled):
            size = inputs.valid.shape[1]
            if len(self._compiled_sizes) < MOST_SIZES:
                self._compiled_sizes.add(size)
            if size not in self._compiled_sizes:
                function = function.plain
        with self._call.in_place():
            return function(inputs, *arguments)

    def by_name(self, of_groups: Sequence[_T]) -> dict[str, _T]:
        """Return a dict from parameter name to the value of the parameter's group."""
        return {name: of_groups[group] for name, group in self.functions.group_of.items()}

    def _is_known(self, sizes: Sequence[int]) -> bool:
        """True if no trial run is needed: all batch sizes were observed, and a compiled graph detects changes."""
        is_settled = bool(self.rehearsals) and self.rehearsals[sizes[0]].is_final
        return is_settled and self._graphs_can_tell and self._seen >= set(sizes)

    @property
    def _graphs_can_tell(self) -> bool:
        """True if graphs for the current update rules and masks are compiled, which detect changed Python values."""
        functions = self.functions
        is_known = self._looked_for == (functions.rules, set(functions.masks))
        return is_known and self.is_compiled

    def _read_step(self, batch: BatchOf, sizes: Sequence[int]) -> None:
        """Observe the step if it may have changed and no compiled graph would detect this."""
        can_tell = self._graphs_can_tell
        if not can_tell:
            self._look(batch, sizes[0])
            with preserve_global_generators():
                self._kinds = {_kind(batch(sizes[0]), 1)}
        for size in sizes:
            if size not in self._seen:
                self._see(batch, size)
        self._recheck(refuse=can_tell)

    def _look(self, batch: BatchOf, full: int) -> None:
        """Observe the step on full batches, and choose or create the graphs for it."""
        functions = self.functions
        self._seen, self.written = set(), frozenset()
        self._see(batch, full)
        if functions.unused and (self._options.has_pull or self._options.has_shift):
            name = min(functions.unused)
            raise CannotStack(
                f"a correction moves the parameter {name}, which its loss does not use"
            )
        key = (*functions.rules, functions.unused)
        if key not in self._made:
            step, first = self._graph(functions.step), self._graph(functions.first)
            self._made[key] = _Graphs(step, first, self._graph(functions.only))
        self.present = self._made[key]
        self._looked_for = functions.rules, set(functions.masks)

    def _see(self, batch: BatchOf, size: int) -> None:
        """Observe the step on batches of one size; the full size comes first."""
        facts = StepFacts.of(self._plain_call, self._module, batch, size)
        if not self._seen:
            self.functions.unused = facts.unused
        if facts.unused != self.functions.unused:
            name = min(facts.unused ^ self.functions.unused)
            raise CannotStack(f"its loss uses {name} in batches of some sizes only")
        self.written |= facts.written
        if self._options.padded and self.written:
            raise CannotPad(f"training_step changes the buffer {min(self.written)}")
        self._seen.add(size)

    def _recheck(self, *, refuse: bool) -> None:
        for run in self.present:
            if isinstance(run, Compiled):
                run.recheck(refuse=refuse)

    def _graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # a schedule of other options than the learning rate needs a new graph every round
        is_compiled = self._options.compiled and len(self._made) < MOST_GRAPHS
        return Compiled(function, is_alone=True) if is_compiled else function

    def _look_at_new_kind(self, inputs: Inputs) -> None:
        """Observe the step again if the batches' examples have types or shapes not seen before."""
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
        self._kinds.add(kind)
        self._recheck(refuse=False)


def _kind(batch: Any, num_axes: int) -> Any:
    """Return the dtype and the shape per example of each tensor in a batch."""
    return tuple((tensor.dtype, tensor.shape[num_axes:]) for tensor in tensors_in(batch))


def _groups(optimizer: Optimizer, module: nn.Module) -> dict[str, int]:
    """Return, by parameter name, the index of the parameter's group in the optimizer."""
    numbers = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for name, p in trained.items() if id(p) not in numbers]
    if missing:
        raise CannotStack(f"its optimizer leaves out the trainable parameter {missing[0]}")
    return {name: numbers[id(p)] for name, p in trained.items()}
