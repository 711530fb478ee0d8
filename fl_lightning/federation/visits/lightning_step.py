"""One local step under the Trainer's precision, device, clipping and the user's hooks.

Two ways with the same result, and a third for modules with manual optimization:

- *lean*: zero_grad, ``training_step`` under the precision plugin's context, backward, clipping, step. Used
  if the Trainer asks for nothing else; it costs a few microseconds more than plain PyTorch. `LightningStep.use`
  makes parts of it faster.
- *full*: Lightning's own chain through ``LightningModule.optimizer_step`` and the strategy, with
  gradient scaler, accumulation and every hook. It costs about 0.2 ms.
- *by hand*: ``training_step`` does everything, by ``self.manual_backward`` and ``self.optimizers()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.client.corrections.correction import AddedTerm
from fl_lightning.client.local_step import SizedBatch, loss_of
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.optimizers import stepped_with_closure, takes_closure
from fl_lightning.client.personal import Mixing
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.engines import (
    FasterStep,
    Speedup,
    StepContext,
    compiled_step,
    reason_against,
)
from fl_lightning.federation.hooks import STEP_HOOKS, overrides
from fl_lightning.federation.visits.local_counts import counts_of
from fl_lightning.federation.visits.steps_by_hand import TermByHand, loss_by_hand, outputs_by_hand
from fl_lightning.federation.visits.visiting import batch_preparation, takes_index
from fl_lightning.kernels import Forwards, direct_layers

# Sets private gradients, given (batch, size, index of the step); returns the loss, or None if it is private.
PrivateGradients = Callable[[Any, int, int], Tensor | None]


class LightningStep:
    """Runs a client's local optimizer steps on a module that is attached to a Trainer.

    Args:
        trainer: the Trainer, whose strategy, precision plugin and clipping are used.
        collector: collects logged values; gets the size of every batch.
        accumulate: number of batches that a full step accumulates.

    Attributes:
        counts: counters of the client that trains.
        term: changes the client's gradients, such as a correction's term; None for plain gradients.
        contrast: from a batch to a term of the client's loss; None for the plain loss.
        examples: computes private gradients; None for plain ones.
        is_lean: whether steps are lean.
        on_new_layout: called when parameters may have moved to new memory.
    """

    def __init__(self, trainer: Trainer, collector: LogCollector, accumulate: int = 1) -> None:
        self.trainer, self.counts = trainer, counts_of(trainer)
        self._module: LightningModule = trainer.lightning_module
        self._optimizer: Optimizer = trainer.optimizers[0]
        self._params = [
            p for each in trainer.optimizers for group in each.param_groups for p in group["params"]
        ]
        self._is_by_hand = not self._module.automatic_optimization
        self._takes_closure = takes_closure(self._optimizer)
        self._term_by_hand: TermByHand | None = None
        self._collector = collector
        self._accumulate = accumulate
        self._precision = trainer.precision_plugin
        self._context = step_context(trainer)
        self._prepare = batch_preparation(trainer)
        self._starts = overrides(self._module, "on_train_batch_start")
        self._ends = overrides(self._module, "on_train_batch_end")
        self._takes_index = takes_index(self._module.training_step)
        self._ended: list[tuple[Any, Any, int]] = []
        self._batch_size: int = trainer.datamodule.batch_size  # type: ignore[attr-defined]
        self._faster: FasterStep | None = None
        self._direct: Forwards | None = None
        self.term: AddedTerm | Mixing | None = None
        self.contrast: Callable[[Any], Tensor] | None = None
        self.examples: PrivateGradients | None = None
        # compiled steps by the other speedups, each with a graph of its own
        self._compiled: dict[frozenset[Speedup], Callable[..., Any]] = {}
        self.on_new_layout: Callable[[], None] = lambda: None
        self.is_lean = accumulate == 1 and extra_work(trainer) is None

    def use(self, speedups: Sequence[Speedup]) -> None:
        """Use exactly these speedups from now on, in lean steps (without hooks, loss scaling or accumulation)."""
        if self._faster is not None:
            self._faster.close()
        if "direct_layers" in speedups and self._direct is None:
            self._direct = direct_layers(self._module)  # compiled graphs hold these forwards
        self._faster = (
            FasterStep(self._module, self._optimizer, speedups, self._direct) if speedups else None
        )
        self.on_new_layout()

    @property
    def speedups(self) -> tuple[Speedup, ...]:
        """Speedups of local steps that are in use, such as ``channels_last``."""
        return () if self._faster is None else self._faster.speedups

    def reason_against(self, speedup: Speedup) -> str | None:
        """Return why a speedup cannot be used for this module's local steps; None if it can."""
        if self._is_by_hand:
            return extra_work(self.trainer)
        if not self.is_lean:
            return "accumulation, gradient scaling or hooks take part in its steps"
        return reason_against(speedup, self._module, self._optimizer)

    def __call__(self, batches: Sequence[SizedBatch], index: int) -> Tensor | None:
        """Run one optimizer step and return the mean loss, detached."""
        self._ended.clear()  # left by a step that raised
        self.counts.step, self.counts.is_in_step = index, True
        try:
            if self.examples is not None:
                loss = self._gradients(batches[0], index)
                self._optimizer.step()  # also without a loss
            elif self._is_by_hand:
                loss = self._by_hand(batches[0], index)
            elif not self.is_lean:
                loss = self._full(batches, index)
            elif self._takes_closure:
                loss = stepped_with_closure(
                    self._optimizer, lambda: self._gradients(batches[0], index)
                )
            else:
                loss = self._gradients(batches[0], index)
                if loss is not None:
                    (self._optimizer if self._faster is None else self._faster).step()
            for ended in self._ended:
                self._module.on_train_batch_end(*ended)
            self._ended.clear()
            return loss
        finally:
            self.counts.is_in_step = False

    def _gradients(self, sized_batch: SizedBatch, index: int) -> Tensor | None:
        """Compute the gradients of a lean step (without hooks, loss scaling or accumulation); return its loss, detached.

        The loss is None if the step is skipped, or if it is private.
        """
        self.forget_gradients()
        self._ended.clear()  # an optimizer may evaluate the loss several times
        if self.examples is not None:  # also of an empty batch
            batch, size = sized_batch
            batch = self._prepared(batch, size, index) if size else None
            loss = self.examples(batch, size, index)
        else:
            batch = self._prepared(*sized_batch, index)
            with nullcontext() if self._faster is None else self._faster.forwards():
                loss = self._loss(batch, index)
            if loss is None:
                return None
            loss.backward()
            loss = loss.detach()
        if self.term is not None:
            self.term.add()
        if bound := self.trainer.gradient_clip_val:
            how = GradClipAlgorithmType(self.trainer.gradient_clip_algorithm or "norm")
            self._precision.clip_gradients(self._optimizer, bound, how)
        return loss

    def _by_hand(self, sized_batch: SizedBatch, index: int) -> Tensor | None:
        """Call ``training_step`` of a module that steps its optimizers itself, and return the loss that it reports."""
        if index == 0:  # gradients of the client before; later the module handles its gradients
            for param in self._module.parameters():
                param.grad = None
        batch = self._prepared(*sized_batch, index)
        with self._adding_by_hand():
            outputs = outputs_by_hand(self._output(batch, index))
        if self._ends:
            self._ended.append((outputs, batch, index))
        return loss_by_hand(outputs)

    def _adding_by_hand(self) -> AbstractContextManager[None]:
        if not isinstance(self.term, AddedTerm):
            return nullcontext()
        if self._term_by_hand is None or self._term_by_hand.term is not self.term:
            self._term_by_hand = TermByHand(self.trainer, self.term, lambda: self.scale)
        return self._term_by_hand.at_work()

    def loss(self, batch: Any, index: int) -> Tensor | None:
        """Return the training step's loss on a prepared batch."""
        return loss_of(self._output(batch, index))

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        for param in self._params:  # `Optimizer.zero_grad` has a profiling hook of 20 µs
            param.grad = None

    @property
    def scale(self) -> float:
        """Factor by which losses are multiplied before the backward pass."""
        scaler = getattr(self._precision, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def backward(self, batch: Any, size: int, index: int, *, factor: float) -> None:
        """Add the gradient of factor · loss to the parameters' gradients.

        Args:
            batch: a batch as it was read.
            size: examples in the batch.
            index: index of the batch.
            factor: factor of the loss.
        """
        self._collector.batch_size = size
        self.counts.batch = self.counts.step = index
        batch = batch if self._prepare is None else self._prepare(batch)
        batch = batch if self._faster is None else self._faster.batch(batch)
        loss = loss_of(self._output(batch, index))
        if loss is not None:
            (loss * factor).backward()

    def _prepared(self, batch: Any, size: int, index: int) -> Any:
        """Convert a batch to the training step's input, by hooks, precision and device."""
        self._collector.batch_size = size
        self.counts.batch = index
        if self._prepare is not None:
            batch = self._prepare(batch)
        if self._starts and self._module.on_train_batch_start(batch, index) == -1:
            raise ConfigurationError(
                "on_train_batch_start returned -1 to skip the rest of the epoch: in a federation "
                "a client's work is set by local_steps or local_epochs instead"
            )
        return batch if self._faster is None else self._faster.batch(batch)

    def _loss(self, batch: Any, index: int) -> Tensor | None:
        output = self._output(batch, index)
        if self._ends:
            outputs = output if isinstance(output, dict) else {"loss": output}
            self._ended.append((outputs, batch, index))
        # nearly always a plain scalar tensor
        loss = output if type(output) is Tensor and output.ndim == 0 else loss_of(output)
        if self.contrast is None or loss is None:
            return loss
        with self._context():
            return loss + self.contrast(batch)

    def _output(self, batch: Any, index: Any) -> Any:
        step, faster = self._module.training_step, self._faster
        # batches of other sizes would need graphs of their own
        is_full = self._collector.batch_size == self._batch_size
        if faster is not None and "compiled" in faster.speedups and is_full:
            key = frozenset(faster.speedups) - {"fused_optimizer"}
            if key not in self._compiled:
                self._compiled[key] = compiled_step(self._module)
            step = self._compiled[key]
        with self._context():
            return step(batch, index) if self._takes_index else step(batch)

    def _full(self, batches: Sequence[SizedBatch], index: int) -> Tensor | None:
        losses: list[Tensor] = []
        sizes: list[int] = []
        values: list[Tensor] = []  # values of the function whose gradient is taken
        term = self.term
        first = self.counts.batch + 1 if index else 0  # steps may have different numbers of batches

        @torch.enable_grad()
        def closure() -> Tensor | None:
            self._ended.clear()
            losses.clear()  # an optimizer may evaluate the closure several times
            sizes.clear()
            values.clear()
            for number, (batch, size) in enumerate(batches):
                number_in_round = first + number
                prepared = self._prepared(batch, size, number_in_round)
                loss = self._loss(prepared, number_in_round)
                if number == 0:
                    self._zero_grad(index)
                if loss is not None:
                    scaled = loss / self._accumulate if self._accumulate > 1 else loss
                    self.trainer.strategy.backward(scaled, self._optimizer)
                    losses.append(loss.detach() * size)
                    sizes.append(size)
                    values.append(scaled.detach())
            if not losses:
                return None
            value = values[0] if len(values) == 1 else torch.stack(values).sum()
            if term is not None:
                share = len(batches) / self._accumulate  # an epoch's last step may have fewer
                term.add(self.scale * share)
                if isinstance(self._optimizer, LBFGS):  # it compares values along a line
                    return value + term.value() * share
            return value

        optimizer = self._module.optimizers()
        self._module.optimizer_step(self.trainer.current_epoch, index, optimizer, closure)  # type: ignore[arg-type]
        return torch.stack(losses).sum() / sum(sizes) if losses else None

    def _zero_grad(self, index: int) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_before_zero_grad(self.trainer, self._module, self._optimizer)
        self._module.on_before_zero_grad(self._optimizer)
        self._module.optimizer_zero_grad(self.trainer.current_epoch, index, self._optimizer)


def step_context(trainer: Trainer) -> StepContext:
    """Return a function that makes the precision plugin's context around a training step."""
    precision, names = trainer.precision_plugin, ("train_step_context", "forward_context")
    is_own = any(getattr(type(precision), name) is not getattr(Precision, name) for name in names)
    return precision.train_step_context if is_own else nullcontext


def extra_work(trainer: Trainer) -> str | None:
    """Return why a local step does more than forward, backward, clipping and optimizer step; None if it does not."""
    if not trainer.lightning_module.automatic_optimization:
        return f"{type(trainer.lightning_module).__name__} steps its optimizers by hand"
    optimizer = trainer.optimizers[0]
    if isinstance(optimizer, LBFGS):
        return "LBFGS evaluates its closure several times"
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        return f"{type(optimizer).__name__} has a zero_grad of its own"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "gradients are scaled"
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        for hook in STEP_HOOKS:
            if overrides(owner, hook):
                return f"{type(owner).__name__} defines {hook}"
    return None
