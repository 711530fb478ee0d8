"""The numbers of a run that reach loggers: those of rounds, of validation and of test.

Processes evaluate different examples. What the module logs per epoch with `self.log` and `self.log_dict` is therefore
reduced over them, as with ``sync_dist=True``, without the module having to say so; a mean is weighted by
batch sizes, as it is in one process. What is logged per step stays each process's own: their numbers of
steps differ.

A Trainer's ``callback_metrics`` keep what earlier rounds measured, such as the last validation, for
callbacks that monitor it. `logged_in_round` is what the present round has measured itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

# per Trainer the round that was begun last, and the metrics of those before it
_BEGUN: WeakKeyDictionary[Trainer, tuple[int, dict[str, Tensor]]] = WeakKeyDictionary()


def begin_round(trainer: Trainer) -> None:
    """Mark all present metrics as older; every callback that asks for new ones calls it first.

    Args:
        trainer: at the start of an epoch; later calls in the same one change nothing.
    """
    number, _ = _BEGUN.get(trainer, (-1, {}))
    if number != trainer.current_epoch:
        _BEGUN[trainer] = trainer.current_epoch, dict(trainer.callback_metrics)


def logged_in_round(trainer: Trainer) -> dict[str, Tensor]:
    """Return the metrics that were logged since the present round began, or after the last one."""
    _, older = _BEGUN.get(trainer, (-1, {}))
    # a metric that is logged again is another tensor
    return {n: value for n, value in trainer.callback_metrics.items() if older.get(n) is not value}


def bring_metrics(trainer: Trainer, metrics: Mapping[str, Tensor], new: Collection[str]) -> None:
    """Add the metrics of a fit in another process to those of a Trainer.

    Args:
        trainer: of this process.
        metrics: by name.
        new: names of those that `logged_in_round` returned there.
    """
    trainer.callback_metrics.update(metrics)
    older = {name: value for name, value in metrics.items() if name not in new}
    _BEGUN[trainer] = trainer.current_epoch, older


def log_round(
    trainer: Trainer,
    values: Mapping[str, float],
    *,
    in_progress_bar: Collection[str] = (),
    twins: Collection[str] = (),
) -> None:
    """Log numbers of the round that has just ended, as `LightningModule.log` does at its end.

    All processes know the same numbers, so that nothing is left to reduce: what ``log`` does for
    that would take a quarter of a small round.

    Args:
        trainer: at the end of an epoch.
        values: by name.
        in_progress_bar: names of those that are shown beside the progress bar.
        twins: names of those that the module logs under another name: callbacks can monitor them, loggers
            do not get them.
    """
    # made at once: one by one they take as long as the step of a small client
    numbers = torch.tensor(list(values.values())).unbind()
    tensors = dict(zip(values, numbers, strict=True))
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in in_progress_bar})
    for logger in trainer.loggers:
        with _one_event(logger):
            shown = {name: value for name, value in values.items() if name not in twins}
            logger.log_metrics(
                {**shown, "epoch": trainer.current_epoch}, step=trainer.global_step - 1
            )
        logger.save()


def log_numbers(trainer: Trainer, values: Mapping[str, float], *, step: int) -> None:
    """Log numbers at any time of a fit; callbacks see them in ``callback_metrics``."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


@contextmanager
def _one_event(logger: Logger) -> Iterator[None]:
    """Writes the scalars of the block as one TensorBoard event a step instead of one each.

    TensorBoard shows the same. A round has more of them than the writer's queue has places, and its
    thread would be woken up for each: that took a third of a small round.
    """
    # a subclass with a log_metrics of its own may give the writer more than a step's scalars
    is_stock = getattr(type(logger), "log_metrics", None) is TensorBoardLogger.log_metrics
    writer: Any = getattr(logger, "experiment", None) if is_stock else None
    file_writer = getattr(writer, "file_writer", None)
    if file_writer is None:
        yield
        return
    event = _Event()
    writer.file_writer = event
    try:
        yield
    finally:
        writer.file_writer = file_writer
        for step, summary in event.summaries.items():
            file_writer.add_summary(summary, step)


class _Event:
    """Stands in for a file writer and makes one summary a step of all that it is given."""

    def __init__(self) -> None:
        self.summaries: dict[int | None, Any] = {}

    def add_summary(
        self, summary: Any, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        """Add what the writer's ``add_scalar`` has made."""
        first = self.summaries.setdefault(global_step, summary)
        if first is not summary:
            first.value.extend(summary.value)


class EvaluationLogs:
    """Shadows a module's ``log`` and ``log_dict`` between `start` and `stop`.

    Args:
        module: whose methods are shadowed.

    Attributes:
        batch: what the present step evaluates; None between steps.
    """

    def __init__(self, module: LightningModule) -> None:
        self.batch: Any = None
        self._module = module
        self._log = module.log
        self._log_dict = module.log_dict

    def start(self) -> EvaluationLogs:
        """Begin to reduce over processes."""
        # no ordinary attributes, which are for the module's own parts
        object.__setattr__(self._module, "log", self.log)
        object.__setattr__(self._module, "log_dict", self.log_dict)
        return self

    def stop(self) -> None:
        """Give the module its own methods back."""
        vars(self._module).pop("log", None)
        vars(self._module).pop("log_dict", None)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; the arguments are those of `LightningModule.log`."""
        if not options.get("on_step"):
            options.setdefault("sync_dist", True)
        if self.batch is not None:
            size = options.get("batch_size") or extract_batch_size(self.batch)
            # Lightning divides a whole number of examples by the number of processes and rounds down
            options["batch_size"] = float(size)
        self._log(name, value, *args, **options)

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Log several values; Lightning's ``log_dict`` gives `log` each with every option."""
        if not options.get("on_step"):
            options.setdefault("sync_dist", True)
        self._log_dict(dictionary, *args, **options)
