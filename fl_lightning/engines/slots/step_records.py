"""Records of a training step on batches of several sizes, and what is found out from them.

Everything in a record is a clone: parameters, buffers and what is frozen. What the step writes to them
is seen, and lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.engines.by_example.functions import FunctionRecorder, Functions
from fl_lightning.engines.by_example.proof import GIVEN, reason_against
from fl_lightning.engines.by_example.record import Record, Recorder
from fl_lightning.engines.by_example.seen import Differs
from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.functional_step import (
    StepResult,
    Tensors,
    TrainingStep,
    copies_of,
    tensors_in,
)

# Makes a batch of so many of a client's examples.
BatchOf = Callable[[int], Any]


class RecordedStep(NamedTuple):
    """A run of the step.

    Attributes:
        record: its operators.
        functions: that it called.
    """

    record: Record
    functions: Functions


@dataclass
class StepRecords:
    """What a module's training step does with batches of several sizes.

    Args:
        step: of the module, in its own layers.
        module: the module.
        batch: makes batches.
        full: examples in a full one.

    Attributes:
        unused: names of parameters that train and that the loss does not depend on.
        written: names of buffers that the step writes to.
    """

    step: TrainingStep
    module: nn.Module
    batch: BatchOf
    full: int
    unused: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    _full: RecordedStep | None = None
    _degrees: list[int] = field(default_factory=list)
    _proved: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Run the step on a full batch twice, and note what holds for all sizes.

        Raises:
            CannotStack: if it does other things the second time, or writes to what does not train.
        """
        first, second = self._seen(self.full), self._seen(self.full)
        if reason_against(first.record, second.record, same_size=True):
            raise CannotStack("training_step does other things each time that it is called")
        self._full = first
        names = [name for name, source in first.record.outputs.items() if source is None]
        self.unused = frozenset(name for name in names if name != "loss")

    def has_proved(self, sizes: Iterable[int]) -> bool:
        """Return whether batches of these sizes are proved to be means over examples."""
        return not self.written and (self.full == 1 or {1, *sizes} <= self._proved)

    def reason_against(self, sizes: Iterable[int]) -> str | None:
        """Return why batches of these sizes are not proved to be means over examples."""
        if self.written:
            return f"training_step changes the buffer {min(self.written)}"
        if self._full is None or self.full == 1:
            return None
        if not self._proved:  # by two sizes that are no special case
            other = self._seen(2 if self.full > 2 else 3)
            if reason := reason_against(self._full.record, other.record):
                return reason
            try:
                self._degrees = self._full.functions.check(other.functions)
            except Differs as difference:
                return str(difference)
            self._proved.add(self.full)
        for size in {1, *sizes} - self._proved:
            if reason := self._difference(self._full, size):
                return reason
            self._proved.add(size)
        return None

    def _difference(self, full: RecordedStep, size: int) -> str | None:
        """Return what the step does with batches of another size that it does not with full ones."""
        try:
            degrees = full.functions.check(self._seen(size, record=False).functions)
        except Differs as difference:
            return str(difference)
        if degrees != self._degrees:
            return f"training_step computes with other numbers for {size} examples"
        return None

    def _seen(self, size: int, *, record: bool = True) -> RecordedStep:
        """Run the step on a batch; without the record of operators that takes half of the time."""
        with preserve_global_generators():  # reading it may draw
            batch = self.batch(size)
        tensors = copies_of(self.module, self.step.stand_ins.prefixes)
        trained = [n for n, p in self.module.named_parameters() if p.requires_grad]
        count = torch.zeros((), dtype=torch.float64, device=tensors[trained[0]].device)
        recorder = Recorder(size, tensors_in(batch)) if record else None
        with (
            preserve_global_generators(only_torch=True),
            self.step.in_place(),
            torch.enable_grad(),
            recorder or nullcontext(),
            FunctionRecorder(size) as functions,
        ):
            result = self.step(tensors, batch, count)
            values = _outputs(result, size) | _gradients(result, tensors, trained)
        if recorder is None:
            return RecordedStep(Record(size), functions.functions)
        for name, tensor in values.items():
            source = None if tensor is None else recorder.source(tensor)
            recorder.record.outputs[name] = source
        self._note_written(recorder, tensors, trained)
        return RecordedStep(recorder.record, functions.functions)

    def _note_written(self, recorder: Recorder, tensors: Tensors, trained: Collection[str]) -> None:
        written = recorder.written(tensors)
        buffers = {name for name, _ in self.module.named_buffers()}
        for name in written:
            if name not in buffers:
                kind = "parameter" if name in trained else "frozen parameter"
                raise CannotStack(f"training_step writes to the {kind} {name}")
        self.written |= frozenset(written)


def _outputs(result: StepResult, size: int) -> dict[str, Tensor | None]:
    outputs: dict[str, Tensor | None] = {"loss": result.loss}
    for name, (value, weight) in result.logged.items():
        if weight is not None and weight != size:
            raise CannotStack(f"it logs {name!r} with a batch_size of {weight} for {size} examples")
        if name:
            outputs[f"logged {name}"] = value
    outputs |= {f"{GIVEN} {place}": tensor for place, tensor in enumerate(result.given)}
    return outputs


def _gradients(
    result: StepResult, tensors: Tensors, trained: Collection[str]
) -> dict[str, Tensor | None]:
    if not result.loss.requires_grad:
        raise CannotStack("its loss has no gradient")
    of = [tensors[name] for name in trained]
    gradients = torch.autograd.grad(result.loss, of, allow_unused=True)
    return dict(zip(trained, gradients, strict=True))
