"""One local step of G clients at once: forward pass, backward pass and optimizer step on stacked tensors.

    (params, state) of shape (G, …), batches (G, B, …)  ->  updated in place

Shapes are fixed and no Python runs between operators, so the whole step (`StackedFunctions`) can be compiled
as one graph, which makes slots fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.functional_step import StepContext, Tensors
from fl_lightning.engines.slots.inputs import StepPart
from fl_lightning.engines.slots.stacked_optimizers import stacked_rule
from fl_lightning.engines.slots.step_functions import (
    Inputs,
    Outputs,
    Slots,
    StackedOptions,
    StackedTerm,
)
from fl_lightning.engines.slots.step_graphs import StepGraphs, StepKind
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer


class StackedStep:
    """Parameters, optimizer states and logged sums of G clients, and the local step that trains all at once.

    Args:
        module: the LightningModule; its parameters are read, never written.
        optimizer: optimizer of all trainable parameters; its options and masks are read before every
            round.
        takes_index: whether ``training_step`` has a second parameter.
        options: options of the stacked step.
        context: makes the context manager in which ``training_step`` runs, such as autocast.
        ignore: names of attributes that Lightning sets on the module, see `Attributes`.
        by_step: returns, per parameter group, the options that change from step to step, as lists.

    Raises:
        CannotStack: if the optimizer has no rule or leaves out a trainable parameter.

    Attributes:
        params: parameters by name, shape (G, …).
        states: optimizer states by name.
        buffers: buffers by name, shape (G, …); empty if ``padded``.
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        shifts: gradient shifts of a correction by name, shape (G, …); empty without a correction.
        count: steps that each client has taken, float64 of shape (G,).
        graphs: compiled graphs of the step, and the findings of its rehearsal.
        given: inputs of metrics in the last step, with their slots (None for all slots).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        takes_index: bool,
        options: StackedOptions,
        context: StepContext = nullcontext,
        ignore: Collection[str] = (),
        by_step: Callable[[], Sequence[Mapping[str, Sequence[float]]]] = tuple,
    ) -> None:
        self.options, self._by_step = options, by_step
        self._optimizer = optimizer
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._trained, first = trained, next(iter(trained.values()))
        self.count = torch.zeros(options.num_slots, device=first.device, dtype=torch.float64)
        self.graphs = StepGraphs(
            module, optimizer, takes_index, options, self.count, context, ignore
        )
        self.params = {name: self._stacked(p.detach()) for name, p in trained.items()}
        self.shifts = (
            {name: torch.zeros_like(p) for name, p in self.params.items()}
            if options.has_shift
            else {}
        )
        self._pull = torch.zeros((), dtype=first.dtype, device=first.device)
        self._lrs: list[Tensor] = []
        self._starts: Tensors = {}
        stacked_buffers = {} if options.padded else dict(module.named_buffers())
        self.buffers = {n: self._stacked(b) for n, b in stacked_buffers.items()}
        self.sums: Tensors = {}
        self.given: list[tuple[list[int] | None, list[Tensor]]] = []
        self.states: dict[str, list[Tensor]] = {}
        self.read_options()

    def read_options(self) -> None:
        """Read learning rates, other options and masks from the optimizer, before `StepGraphs.rehearse`."""
        groups = self._optimizer.param_groups
        rules = [stacked_rule(self._optimizer, group) for group in groups]
        if any(rule is None for rule in rules):
            raise CannotStack(f"there is no stacked form of {type(self._optimizer).__name__}")
        by_step = self._by_step() or [{}] * len(groups)
        if changing := {name for options in by_step for name in options} - {"lr"}:
            raise CannotStack(f"a schedule changes {min(changing)} from step to step")
        # one rate, or one per local step; as tensors, because a graph depends on the values of Python numbers
        rates = [o.get("lr", float(g["lr"])) for o, g in zip(by_step, groups, strict=True)]
        new = [self._pull.new_tensor(rate) for rate in rates]
        if [lr.shape for lr in self._lrs] != [lr.shape for lr in new]:
            self._lrs = new
        for lr, present in zip(self._lrs, new, strict=True):
            lr.copy_(present)
        masks = self._optimizer.masks if isinstance(self._optimizer, MaskedOptimizer) else {}
        functions = self.graphs.functions
        functions.masks = {name: masks[p] for name, p in self._trained.items() if p in masks}
        if rules != functions.rules:
            functions.rules = [rule for rule in rules if rule is not None]
            self.states = {
                name: [torch.zeros_like(self.params[name]) for _ in range(rule.num_states)]
                for name, rule in self.graphs.by_name(functions.rules).items()
            }

    def pull_to(self, starts: Tensors, pull: float) -> None:
        """Set the strength of a correction's pull and the parameters, by name, towards which it pulls."""
        self._starts = starts
        self._pull.fill_(pull)

    def __call__(self, part: StepPart, apart: Sequence[StepPart] = ()) -> None:
        """Run one step in every slot.

        Args:
            part: batches of all slots.
            apart: batches of slots with another batch size. Their step runs on copies, and its results
                replace those of ``part`` in these slots.
        """
        ends = [self._apart(other) for other in apart]
        inputs = self._inputs(part)
        outputs = self._done("step", inputs, self._slots, self.buffers)
        for other in apart:
            for sums in outputs.sums.values():
                sums[other.slots] = 0
        self._add(outputs.sums)
        for other, (rows, result) in zip(apart, ends, strict=True):
            self._put(other, rows, result)

    def _apart(self, part: StepPart) -> tuple[list[Tensor], Outputs]:
        """Run a step for some slots on copies of their tensors; return the copies and the step's outputs."""
        at = torch.tensor(part.slots, device=self.count.device)
        slots, buffers = self._slots, {name: b[at] for name, b in self.buffers.items()}
        term = slots.term
        if term is not None:
            shifts = {name: shift[at] for name, shift in term.shifts.items()}
            term = StackedTerm(term.pull, term.starts, shifts)
        params = {name: p[at] for name, p in slots.params.items()}
        states = {name: [s[at] for s in of] for name, of in slots.states.items()}
        draws = [numbers[at] for numbers in part.draws]
        inputs = Inputs(part.batch, part.valid, self.count[at], draws)
        copies = Slots(params, states, slots.lrs, term)
        outputs = self.graphs.run_apart(inputs, copies, buffers)
        rows = [*params.values(), *(s for of in states.values() for s in of), *buffers.values()]
        return [*rows, inputs.steps], outputs

    def _put(self, part: StepPart, rows: list[Tensor], outputs: Outputs) -> None:
        """Copy tensors that `_apart` returned into the slots."""
        at = torch.tensor(part.slots, device=self.count.device)
        states = [s for of in self.states.values() for s in of]
        places = [*self.params.values(), *states, *self.buffers.values(), self.count]
        for place, row in zip(places, rows, strict=True):
            place[at] = row
        for name, sums in outputs.sums.items():
            if name not in self.sums:
                self.sums[name] = sums.new_zeros(len(self.count), 2)
            self.sums[name][at] += sums
        self.given.append((part.slots, outputs.given))

    def first(self, start: Tensors, part: StepPart) -> None:
        """Start a new client in every slot and take its first step.

        Because all clients start from the same parameters, one model's forward pass on all batches is
        enough, which is cheaper than a reset and a step.

        Args:
            start: initial parameters by name, without the axis of clients.
            part: batches of all slots.
        """
        torch._foreach_zero_([self.count, *self.sums.values()])
        inputs = self._inputs(part)
        self._add(self._done("first", inputs, start, self._slots).sums)

    def only(self, start: Tensors, part: StepPart, active: Tensors) -> tuple[Tensor, Tensors]:
        """Train G clients that take only one step, without changing the slots' tensors.

        Args:
            start: initial parameters by name, in the order of the deltas' coordinates.
            part: batches of all slots.
            active: for parameters with frozen entries, the indices of the trainable entries.

        Returns:
            The clients' deltas, shape (G, k), and their sums as in `sums`.
        """
        self.count.zero_()
        inputs = self._inputs(part)
        outputs, deltas = self.graphs.run("only", inputs, start, self._slots, active)
        self.given = [(None, outputs.given)]
        return deltas, outputs.sums

    @property
    def _slots(self) -> Slots:
        options, term = self.options, None
        if options.has_pull or options.has_shift:
            term = StackedTerm(self._pull, self._starts if options.has_pull else {}, self.shifts)
        return Slots(self.params, self.states, self._lrs, term)

    def _inputs(self, part: StepPart) -> Inputs:
        return Inputs(part.batch, part.valid, self.count, part.draws)

    def _done(self, kind: StepKind, inputs: Inputs, *arguments: Any) -> Outputs:
        """Run one kind of step (any, first or only), and keep its inputs to metrics in `given`."""
        outputs: Outputs = self.graphs.run(kind, inputs, *arguments)
        self.given = [(None, outputs.given)]
        return outputs

    def _add(self, logged: Tensors) -> None:
        for name, sums in logged.items():
            if name in self.sums:
                self.sums[name] += sums
            else:
                self.sums[name] = sums

    def _stacked(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).repeat(self.options.num_slots, *[1] * tensor.ndim)
