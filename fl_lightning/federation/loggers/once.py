"""Numbers that a run logs once, as those of its test: a table on TensorBoard, not charts with one dot.

They are kept in ``results.json`` of the run's folder, and every other logger has them as it has all numbers.
A number that is not finite is null there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from fl_lightning.federation.checkpoints.run_folder import own_run_folder

RESULTS = "results.json"


def log_once(trainer: Trainer, title: str, numbers: Mapping[str, float], *, step: int) -> None:
    """Log numbers that the run will not log again.

    Args:
        trainer: with the loggers.
        title: of TensorBoard's table.
        numbers: by name.
        step: of the run.
    """
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_metrics(dict(numbers), step=step)
    keep_once(trainer, title, numbers)


def keep_once(trainer: Trainer, title: str, numbers: Mapping[str, float]) -> None:
    """Keep in the run's folder and in a table of TensorBoard what the other loggers have already."""
    if not trainer.is_global_zero or not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    folder = Path(own_run_folder(trainer))
    before = logged_once(folder)
    kept = {**before, **numbers}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({n: v if math.isfinite(v) else None for n, v in kept.items()}, indent=1)
    (folder / RESULTS).write_text(text + "\n")
    if news := {name: value for name, value in numbers.items() if before.get(name) != value}:
        for board in boards(trainer):
            board.experiment.add_text(f"results/{title}", table(news), trainer.global_step)


def logged_once(folder: Path) -> dict[str, float]:
    """Return what a run has logged once, the test's numbers first."""
    path = folder / RESULTS
    kept = json.loads(path.read_text()) if path.exists() else {}
    numbers = {name: math.nan if value is None else float(value) for name, value in kept.items()}
    return dict(sorted(numbers.items(), key=lambda pair: not is_of_test(pair[0])))


def is_of_test(name: str) -> bool:
    """Return whether a number is one of the test's, by its name."""
    return name.startswith("test")


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def table(numbers: Mapping[str, float]) -> str:
    """Return numbers as TensorBoard's tab Text shows a table.

    Example:
        >>> print(table({"test/loss": 0.25}))
        | name | value |
        |---|---|
        | test/loss | 0.25 |
    """
    rows = [f"| {name} | {value:.6g} |" for name, value in numbers.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


class SingleDots:
    """Keeps from TensorBoard what an evaluation logs once; a name that comes again is logged as a curve.

    Args:
        trainer: with the loggers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._boards = [
            board
            for board in boards(trainer)
            if type(board).log_metrics is TensorBoardLogger.log_metrics
        ]

    def start(self) -> SingleDots:
        """Begin to keep them back."""
        for board in self._boards:
            vars(board)["log_metrics"] = _FromSecondOn(board.log_metrics)
        return self

    def stop(self) -> None:
        """Give the loggers their own way back."""
        for board in self._boards:
            vars(board).pop("log_metrics", None)


class _FromSecondOn:
    def __init__(self, log: Any) -> None:
        self._log = log
        self._first: dict[str, tuple[float, int | None]] = {}
        self._often: set[str] = set()

    def __call__(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name in metrics.keys() & self._first.keys():
            value, at = self._first.pop(name)
            self._log({name: value}, at)
            self._often.add(name)
        self._first |= {n: (v, step) for n, v in metrics.items() if n not in self._often}
        if again := {name: value for name, value in metrics.items() if name in self._often}:
            self._log(again, step)
