"""Figures and histograms in any logger; the charts, tables and HPARAMS tab of TensorBoard.

Figures have the same name in every logger. TensorBoard, W&B, MLflow and Comet have calls of their own;
other loggers are called as Lightning names it, ``log_image(key, images, step)``. If no logger accepts
figures, as with `lightning.pytorch.loggers.CSVLogger`, they become files: ``figures/<name>.png`` in the
run's folder. Loggers are recognised by class name, so that packages that are not installed need no import.

TensorBoard sorts charts by name. Names of this package's own metrics begin with a dot there, and so come after
``train/`` and ``val/`` (`board_tag`). The tab Custom Scalars has the order given here. When a run ends, the tab
Text gets tables of the last round and of metrics logged once, and HPARAMS gets them with the run's options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from fl_lightning.federation import (
    boards,
    is_of_test,
    log_event,
    logged_once,
    own_run_folder,
    table,
)
from fl_lightning.reports.charts import file_name
from fl_lightning.reports.history import History, RoundLine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def hold_constants(
    trainer: Trainer, names: str = _RARELY_CHANGES, earlier: Sequence[RoundLine] = ()
) -> Callable[[], None]:
    """Keep metrics out of TensorBoard's charts while their value is constant; also the epoch's number.

    A metric becomes a chart, with all of its earlier values, once its value changes. Other loggers get
    every metric at once.

    Args:
        trainer: Trainer with the loggers, whose ``log_metrics`` is replaced.
        names: pattern of the names that are held back until their value changes.
        earlier: rounds of the run before this fit.

    Returns:
        Function that restores the loggers.
    """
    undo = ExitStack()
    for board in boards(trainer):
        if type(board).log_metrics is TensorBoardLogger.log_metrics:
            log = partial(log_event, board)
            vars(board)["log_metrics"] = _ChangingMetrics(log, re.compile(names), earlier)
            undo.callback(vars(board).pop, "log_metrics", None)
    return undo.close


class _ChangingMetrics:
    """Replaces a logger's ``log_metrics``: holds back metrics that match a pattern until their value changes."""

    def __init__(self, log: Any, held: re.Pattern[str], earlier: Sequence[RoundLine]) -> None:
        self._pattern, self._changed = held, set[str]()
        # metrics that have not changed: value, and steps at which it was logged first and last
        self._held: dict[str, tuple[float, list[int | None]]] = {}
        self._log: Any = lambda *_: None  # earlier rounds are charts already
        for line in earlier:
            self(line.metrics, line.number - 1)
        self._log = log

    def __call__(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        shown = {}
        for name, value in metrics.items():
            if name in self._changed or not self._pattern.match(name):
                shown[board_tag(name)] = value
                continue
            first, steps = self._held.setdefault(name, (_in_single(value), []))
            if _in_single(value) == first:
                steps[1:] = [step]  # two points draw a constant line
                continue
            del self._held[name]
            for at in steps:
                self._log({board_tag(name): first}, at)
            self._changed.add(name)
            shown[board_tag(name)] = value
        shown.pop("epoch", None)
        if shown:
            self._log(shown, step)


def _in_single(value: Any) -> Any:
    """Round a number to single precision, as TensorBoard and ``rounds.jsonl`` store it."""
    return value if isinstance(value, Mapping) else float(np.float32(value))


def lay_out(trainer: Trainer, logged: Iterable[str]) -> None:
    """Set the order of charts in TensorBoard's tab Custom Scalars. Call this in the first process only."""
    names = [*logged]
    layout = {
        tab: {
            title: ["Multiline", [pattern]]
            for title, pattern in charts.items()
            if any(re.match(pattern, name) for name in names)
        }
        for tab, charts in _LAYOUT.items()
    }
    for board in boards(trainer):
        board.experiment.add_custom_scalars(
            {tab: charts for tab, charts in layout.items() if charts}
        )


def show_results(trainer: Trainer, folder: Path, history: History) -> None:
    """Write the last round's metrics (tab Text) and the run's options (tab HPARAMS) to TensorBoard."""
    from torch.utils.tensorboard.summary import hparams  # a second to import

    last = {name: [*history.curve(name).values()][-1] for name in history.names}
    tests = {name: value for name, value in logged_once(folder).items() if is_of_test(name)}
    shown = [name for name in last if re.match("(val|train)[/_]", name)]
    metrics = {name: last[name] for name in shown[:_MOST_METRICS]}
    for board in boards(trainer):
        board.experiment.add_text("last round", table(last), trainer.global_step)
        if (options := run_options(folder)) and (tests or metrics):
            # this tab reads metrics from charts: those without a chart are written as options
            for summary in hparams({**tests, **options}, metrics):
                board.experiment.file_writer.add_summary(summary)
        board.experiment.flush()


def run_options(folder: Path) -> dict[str, str | float | bool]:
    """Return a run's options by dotted path, read from its ``config.yaml``; empty without that file."""
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


# prefixes of our metrics; TensorBoard sorts by name, and val/ and train/ should come first
_OURS = re.compile(
    r"(calibration|clients?|global|head|local|mask|partition|personal|privacy|recalibration"
    r"|results|round|search|secure)(/|$)"
)


def board_tag(name: str) -> str:
    """Return a TensorBoard tag; names of this package's own metrics get a dot, to sort after ``val/``.

    Example:
        >>> board_tag("round/seconds"), board_tag("val/loss")
        ('· round/seconds', 'val/loss')
    """
    return f"· {name}" if _OURS.match(name) else name


_FIGURES = "figures"


def log_figure(trainer: Trainer, name: str, draw: Callable[[], Figure], *, step: int) -> None:
    """Draw a figure and log it, or save it as a PNG file if no logger of the Trainer accepts figures.

    Without a logger nothing is drawn. Call this in the first process only.
    """
    if not trainer.loggers:
        return
    figure = draw()
    shown = [_show(logger, name, figure, step) for logger in trainer.loggers]
    if not any(shown):
        path = Path(own_run_folder(trainer), _FIGURES, f"{file_name(name)}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def log_histogram(trainer: Trainer, name: str, values: Tensor, *, step: int) -> None:
    """Log a histogram of the finite values, shape (n,), with each logger that accepts histograms."""
    finite = values[values.isfinite()]
    if not len(finite):
        return
    loggers: list[Any] = trainer.loggers
    for logger in loggers:
        kinds = _kinds(logger)
        if "TensorBoardLogger" in kinds:
            logger.experiment.add_histogram(board_tag(name), finite, step)
        elif "CometLogger" in kinds:
            logger.experiment.log_histogram_3d(finite.numpy(), name=name, step=step)
        elif "WandbLogger" in kinds:
            import wandb  # installed, because its logger is used

            bins = min(64, max(8, len(finite) // 4))
            counts, edges = np.histogram(finite.numpy(), bins=bins)
            bars = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
            logger.experiment.log({name: bars})


def log_clients(trainer: Trainer, values: Mapping[int, Mapping[str, float]], *, step: int) -> None:
    """Log finite per-client metrics as ``client/<number>/<name>``, which callbacks cannot monitor."""
    numbers = {
        f"client/{client}/{name}": value
        for client, metrics in values.items()
        for name, value in metrics.items()
        if math.isfinite(value)
    }
    for logger in trainer.loggers if numbers else ():
        logger.log_metrics(numbers, step=step)


def _show(logger: Any, name: str, figure: Figure, step: int) -> bool:
    """Log a figure with one logger, and return whether this logger accepts figures."""
    kinds = _kinds(logger)
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_figure(board_tag(name), figure, step, close=False)
    elif "WandbLogger" in kinds:
        # W&B refuses a step below the last number's, so the caption has the step
        logger.log_image(key=name, images=[_pixels(figure)], caption=[f"step {step}"])
    elif "MLFlowLogger" in kinds:
        path = f"{_FIGURES}/{file_name(name)}_{step}.png"
        logger.experiment.log_figure(logger.run_id, figure, path)
    elif "CometLogger" in kinds:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)
    elif hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[_pixels(figure)], step=step)
    else:
        return False
    return True


def _kinds(logger: Any) -> set[str]:
    """Return the names of a logger's class and of all its base classes."""
    return {kind.__name__ for kind in type(logger).__mro__}


def _pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """Return a figure as pixels, shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
