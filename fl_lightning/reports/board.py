"""Order of TensorBoard's charts, its table of the last round, and its HPARAMS tab.

TensorBoard sorts charts by name: names of this package's own metrics begin with a dot, and so come after
``train/`` and ``val/`` (`board_tag`). The tab Custom Scalars has the order given here. When a run ends, the tab
Text gets tables of the last round and of metrics logged once, and HPARAMS gets them with the run's options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from fl_lightning.federation import (
    board_tag,
    boards,
    is_of_test,
    log_event,
    logged_once,
    table,
)
from fl_lightning.reports.history import History

_SECTIONS = ("seed_everything", "model", "data", "federation")
_MOST_OPTIONS = 60
_MOST_METRICS = 12
# metrics that often have the same value in every round
_RARELY_CHANGES = r"(calibration|head|mask|privacy|recalibration|round|secure)/|hp_metric$"
# tabs in this order: title, then title of a chart and the names in it; losses have a scale of their own
_LAYOUT: dict[str, dict[str, str]] = {
    "1 Results": {
        "validation": r"^val[/_](?!.*loss).*",
        "validation loss": r"^val[/_].*loss.*",
        "training": r"^train[/_](?!.*(loss|_std$)).*",
        "training loss": r"^train[/_](?!.*_std$).*loss.*",
    },
    "2 Clients": {
        "spread over clients": r"^train[/_].*_std$",
        "held-out examples, mean": r"^(· )?(clients|personal|local|global)/(?!.*(loss|_std|_jain|_worst_decile)).*",
        "held-out examples, worst decile": r"^(· )?(clients|personal)/(?!.*loss).*_worst_decile$",
    },
    "3 Cost": {
        "seconds": r"^(· )?round/(virtual_)?seconds$",
        "privacy": r"^(· )?privacy/.*",
        "masks": r"^(· )?mask/.*",
    },
}


class Charts:
    """Keeps metrics that never change, and the epoch's number, out of TensorBoard's charts.

    A metric becomes a chart, with all of its earlier values, once its value changes. Other loggers get
    every metric at once.

    Args:
        trainer: Trainer with the loggers.
        held: pattern of the names that are held back until their value changes.
    """

    def __init__(self, trainer: Trainer, held: str = _RARELY_CHANGES) -> None:
        self._held = held
        self._boards = [
            board
            for board in boards(trainer)
            if type(board).log_metrics is TensorBoardLogger.log_metrics
        ]

    def start(self) -> Charts:
        """Replace the loggers' ``log_metrics``."""
        for board in self._boards:
            vars(board)["log_metrics"] = _Changing(
                partial(log_event, board), re.compile(self._held)
            )
        return self

    def stop(self) -> None:
        """Restore the loggers' own ``log_metrics``."""
        for board in self._boards:
            vars(board).pop("log_metrics", None)


class _Changing:
    def __init__(self, log: Any, held: re.Pattern[str]) -> None:
        self._log, self._pattern = log, held
        self._held: dict[str, tuple[float, list[int | None]]] = {}
        self._changed: set[str] = set()

    def __call__(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        shown = {}
        for name, value in metrics.items():
            if name in self._changed or not self._pattern.match(name):
                shown[board_tag(name)] = value
                continue
            first, steps = self._held.setdefault(name, (value, []))
            if value == first:
                steps[1:] = [step]  # the first and the last one draw the line
                continue
            del self._held[name]
            for at in steps:
                self._log({board_tag(name): first}, at)
            self._changed.add(name)
            shown[board_tag(name)] = value
        shown.pop("epoch", None)
        if shown:
            self._log(shown, step)


def lay_out(trainer: Trainer, logged: Iterable[str]) -> None:
    """Set the order of TensorBoard's charts, without empty ones; call it in the first process only."""
    names = [*logged]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    curves = [callback for callback in callbacks if getattr(callback, "has_curves", False)]
    # charts whose metrics may be logged for the first time in a later round
    later = {title for callback in curves for title in getattr(callback, "late_charts", ())}
    layout = {
        tab: {
            title: ["Multiline", [pattern]]
            for title, pattern in charts.items()
            if title in later or any(re.match(pattern, name) for name in names)
        }
        for tab, charts in _LAYOUT.items()
    }
    for board in boards(trainer):
        board.experiment.add_custom_scalars(
            {tab: charts for tab, charts in layout.items() if charts}
        )


def show_results(trainer: Trainer, folder: Path, history: History) -> None:
    """Write the table of the last round and the HPARAMS tab to TensorBoard.

    Args:
        trainer: Trainer with the loggers.
        folder: folder of the run; its options are read from ``config.yaml`` if that exists.
        history: history of the run's rounds.
    """
    from torch.utils.tensorboard.summary import hparams  # a second to import

    last = {name: [*history.curve(name).values()][-1] for name in history.names}
    tests = {name: value for name, value in logged_once(folder).items() if is_of_test(name)}
    shown = [name for name in last if name.split("/")[0] in ("val", "train")]
    metrics = {name: last[name] for name in shown[:_MOST_METRICS]}
    for board in boards(trainer):
        board.experiment.add_text("last round", table(last), trainer.global_step)
        if (options := run_options(folder)) and (tests or metrics):
            # this tab reads metrics from charts: those without a chart are written as options
            for summary in hparams({**tests, **options}, metrics):
                board.experiment.file_writer.add_summary(summary)
        board.experiment.flush()


def run_options(folder: Path) -> dict[str, str | float | bool]:
    """Return the options in a run's ``config.yaml`` by path; empty without that file."""
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    known = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    pairs = (pair for name in _SECTIONS for pair in _leaves(name, known.get(name)))
    return dict(list(pairs)[:_MOST_OPTIONS])


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            kept = path if name == "init_args" else f"{path}.{name}"
            yield from _leaves(kept, inner)
    elif isinstance(value, str | int | float | bool):
        yield path.removesuffix(".class_path"), value
