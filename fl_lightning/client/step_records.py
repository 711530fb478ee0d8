"""Records of a training step on batches of several sizes, and what is found out from them.

Everything in a record is a clone: parameters, buffers and what is frozen. What the step writes to them
is seen, and lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.by_example.proof import GIVEN, reason_against
from fl_lightning.client.by_example.record import Record, Recorder
from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.functional_step import (
    Result,
    Tensors,
    TrainingStep,
    copies_of,
    tensors_in,
)
from fl_lightning.core.seeds import preserve_global_generators

# Makes a batch of so many of a client's examples.
BatchOf = Callable[[int], Any]


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
    _records: dict[int, Record] = field(default_factory=dict)
    _proved: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Run the step on a full batch twice, and note what holds for all sizes.

        Raises:
            CannotStack: if it does other things the second time, or writes to what does not train.
        """
        first, record = self._recorded(self.full), self._recorded(self.full)
        if reason_against(first, record, same_size=True):
            raise CannotStack("training_step does other things each time that it is called")
        self._records[self.full] = record
        names = [name for name, source in record.outputs.items() if source is None]
        self.unused = frozenset(name for name in names if name != "loss")

    def reason_against(self, sizes: Iterable[int]) -> str | None:
        """Return why batches of these sizes are not proved to be means over examples."""
        if self.written:
            return f"training_step changes the buffer {min(self.written)}"
        for size in {1, *sizes} - self._proved:
            if size == self.full:
                continue
            reason = reason_against(self._record(self.full), self._record(size))
            if reason is not None:
                return reason
            self._proved.add(size)
        return None

    def _record(self, size: int) -> Record:
        if size not in self._records:
            self._records[size] = self._recorded(size)
        record = self._records[size]
        if size != self.full:
            del self._records[size]  # nobody asks again
        return record

    def _recorded(self, size: int) -> Record:
        with preserve_global_generators():  # reading it may draw
            batch = self.batch(size)
        tensors = copies_of(self.module, self.step.stand_ins.prefixes)
        trained = [n for n, p in self.module.named_parameters() if p.requires_grad]
        count = torch.zeros((), dtype=torch.float64, device=tensors[trained[0]].device)
        with (
            preserve_global_generators(only_torch=True),
            self.step.in_place(),
            torch.enable_grad(),
            Recorder(size, tensors_in(batch)) as recorder,
        ):
            result = self.step(tensors, batch, count)
            values = _outputs(result, size) | _gradients(result, tensors, trained)
        for name, tensor in values.items():
            source = None if tensor is None else recorder.source(tensor)
            recorder.record.outputs[name] = source
        self._note_written(recorder, tensors, trained)
        record: Record = recorder.record
        return record

    def _note_written(self, recorder: Recorder, tensors: Tensors, trained: Collection[str]) -> None:
        written = recorder.written(tensors)
        buffers = {name for name, _ in self.module.named_buffers()}
        for name in written:
            if name not in buffers:
                kind = "parameter" if name in trained else "frozen parameter"
                raise CannotStack(f"training_step writes to the {kind} {name}")
        self.written |= frozenset(written)


def _outputs(result: Result, size: int) -> dict[str, Tensor | None]:
    outputs: dict[str, Tensor | None] = {"loss": result.loss}
    for name, (value, weight) in result.logged.items():
        if weight is not None and weight != size:
            raise CannotStack(f"it logs {name!r} with a batch_size of {weight} for {size} examples")
        if name:
            outputs[f"logged {name}"] = value
    outputs |= {f"{GIVEN} {place}": tensor for place, tensor in enumerate(result.given)}
    return outputs


def _gradients(
    result: Result, tensors: Tensors, trained: Collection[str]
) -> dict[str, Tensor | None]:
    if not result.loss.requires_grad:
        raise CannotStack("its loss has no gradient")
    of = [tensors[name] for name in trained]
    gradients = torch.autograd.grad(result.loss, of, allow_unused=True)
    return dict(zip(trained, gradients, strict=True))
