"""The numbers of a run that reach loggers: those of rounds, of validation and of test.

A Trainer's ``callback_metrics`` keep metrics of earlier rounds, such as the last validation, for
callbacks that monitor them. `logged_in_round` returns those of the current round.

Numbers that a run logs once, such as test metrics, become a table on TensorBoard, not charts with one
dot, and an entry in ``results.json`` of the run's folder; there a number that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fl_lightning.core.processes import write_whole
from fl_lightning.federation.checkpoints.run_folder import own_run_folder

# by Trainer: the round that began last, and the metrics of earlier rounds
_BEGUN: WeakKeyDictionary[Trainer, tuple[int, dict[str, Tensor]]] = WeakKeyDictionary()


def begin_round(trainer: Trainer) -> None:
    """Mark the metrics logged so far as those of earlier rounds, for `logged_in_round`.

    Args:
        trainer: the Trainer, at the start of an epoch; later calls in the same epoch change nothing.
    """
    number, _ = _BEGUN.get(trainer, (-1, {}))
    if number != trainer.current_epoch:
        _BEGUN[trainer] = trainer.current_epoch, dict(trainer.callback_metrics)


def logged_in_round(trainer: Trainer) -> dict[str, Tensor]:
    """Return the metrics that were logged since the current round began."""
    _, older = _BEGUN.get(trainer, (-1, {}))
    # a metric that is logged again is another tensor
    return {n: value for n, value in trainer.callback_metrics.items() if older.get(n) is not value}


def add_metrics(trainer: Trainer, metrics: Mapping[str, Tensor], new: Collection[str]) -> None:
    """Add metrics of a fit that ran in another process to the ``callback_metrics`` of this process's Trainer.

    Args:
        trainer: the Trainer of this process.
        metrics: metrics by name.
        new: names of the metrics that `logged_in_round` returned there.
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
    """Log numbers of the round that has just ended, like `LightningModule.log` at the end of an epoch.

    All processes have the same numbers, so that nothing needs to be reduced: ``log`` would spend a
    quarter of a small round on that.

    Args:
        trainer: the Trainer, at the end of an epoch.
        values: the numbers by name.
        in_progress_bar: names of the values shown in the progress bar.
        twins: names of values that the module logs under another name: callbacks can monitor them,
            loggers do not get them.
    """
    # all at once: one tensor after the other takes as long as a small client's step
    numbers = torch.tensor(list(values.values())).unbind()
    tensors = dict(zip(values, numbers, strict=True))
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in in_progress_bar})
    shown = {name: value for name, value in values.items() if name not in twins}
    shown["epoch"] = trainer.current_epoch
    for logger in trainer.loggers:
        step = trainer.global_step - 1
        # a subclass may override log_metrics, and a report shadows it
        is_stock = getattr(type(logger), "log_metrics", None) is TensorBoardLogger.log_metrics
        if is_stock and "log_metrics" not in vars(logger):
            log_event(logger, shown, step)
        else:
            logger.log_metrics(shown, step=step)
        logger.save()


def log_numbers(trainer: Trainer, values: Mapping[str, float], *, step: int) -> None:
    """Log numbers at any time of a fit; callbacks see them in ``callback_metrics``."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


@rank_zero_only
def log_event(board: Any, values: Mapping[str, Any], step: int | None) -> None:
    """Write several numbers to TensorBoard as one event, not as one event each.

    Otherwise each number would be an event. A round has more of them than the writer's queue has places,
    and waking its thread for each took a third of a small round.
    """
    if any(isinstance(value, Mapping) for value in values.values()):  # several lines in one chart
        TensorBoardLogger.log_metrics(board, dict(values), step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary

    begin = f"{board._prefix}{board.LOGGER_JOIN_CHAR}" if board._prefix else ""
    scalars = [
        Summary.Value(tag=f"{begin}{name}", simple_value=float(value))
        for name, value in values.items()
    ]
    board.experiment.file_writer.add_summary(Summary(value=scalars), step)


RESULTS = "results.json"


def log_once(trainer: Trainer, title: str, numbers: Mapping[str, float], *, step: int) -> None:
    """Log numbers that a run logs only once, such as test metrics.

    Args:
        trainer: the Trainer whose loggers get the numbers.
        title: title of the table on TensorBoard.
        numbers: the numbers by name.
        step: step of the run that loggers show.
    """
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_metrics(dict(numbers), step=step)
    keep_once(trainer, title, numbers)


def keep_once(trainer: Trainer, title: str, numbers: Mapping[str, float]) -> None:
    """Add numbers to the run's ``results.json``, and to a table on TensorBoard if they are new."""
    if not trainer.is_global_zero or not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    folder = Path(own_run_folder(trainer))
    before = logged_once(folder)
    kept = {**before, **numbers}
    text = json.dumps({n: v if math.isfinite(v) else None for n, v in kept.items()}, indent=1)
    write_whole(folder / RESULTS, text + "\n")
    if news := {name: value for name, value in numbers.items() if before.get(name) != value}:
        for board in boards(trainer):
            board.experiment.add_text(f"results/{title}", table(news), trainer.global_step)


def logged_once(folder: Path) -> dict[str, float]:
    """Return the numbers in a run's ``results.json``, test metrics first."""
    path = folder / RESULTS
    kept = json.loads(path.read_text()) if path.exists() else {}
    numbers = {name: math.nan if value is None else float(value) for name, value in kept.items()}
    return dict(sorted(numbers.items(), key=lambda pair: not is_of_test(pair[0])))


def is_of_test(name: str) -> bool:
    """Return whether a metric's name begins with ``test``."""
    return name.startswith("test")


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return a Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def table(numbers: Mapping[str, float]) -> str:
    """Return numbers as a Markdown table, for TensorBoard's Text tab.

    Example:
        >>> print(table({"test/loss": 0.25}))
        | name | value |
        |---|---|
        | test/loss | 0.25 |
    """
    rows = [f"| {name} | {value:.6g} |" for name, value in numbers.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])
