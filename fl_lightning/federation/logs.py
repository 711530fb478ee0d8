"""The numbers of a run that reach loggers: those of rounds, of validation and of test.

A Trainer's ``callback_metrics`` keep metrics of earlier rounds, such as the last validation, for
callbacks that monitor them. `logged_in_round` returns those of the current round.

Numbers that a run logs once, such as test metrics, become a table on TensorBoard, not charts with one
dot, and an entry in ``results.json`` of the run's folder; there a number that is not finite is null.

Figures have the same name in every logger. TensorBoard, W&B, MLflow and Comet have calls of their own;
other loggers are called as Lightning names it, ``log_image(key, images, step)``. If no logger accepts
figures, as with `lightning.pytorch.loggers.CSVLogger`, they become files: ``figures/<name>.png`` in the
run's folder. Loggers are told apart by class name: packages that are not installed need no import.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fl_lightning.federation.checkpoints.run_folder import own_run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# by Trainer: the round that began last, and the metrics of earlier rounds
_BEGUN: WeakKeyDictionary[Trainer, tuple[int, dict[str, Tensor]]] = WeakKeyDictionary()


def begin_round(trainer: Trainer) -> None:
    """Mark all metrics as of earlier rounds; to be called before `logged_in_round` in a round.

    Args:
        trainer: at the start of an epoch; later calls in the same epoch change nothing.
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
    """Add the metrics of a fit in another process to a Trainer's metrics.

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
    """Log numbers of the round that has just ended, as `LightningModule.log` does at its end.

    All processes have the same numbers, so that nothing needs to be reduced: ``log`` would spend a
    quarter of a small round on that.

    Args:
        trainer: at the end of an epoch.
        values: by name.
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
    for logger in trainer.loggers:
        _log(trainer, logger, {**shown, "epoch": trainer.current_epoch})
        logger.save()


def log_numbers(trainer: Trainer, values: Mapping[str, float], *, step: int) -> None:
    """Log numbers at any time of a fit; callbacks see them in ``callback_metrics``."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


def _log(trainer: Trainer, logger: Any, values: Mapping[str, float]) -> None:
    step = trainer.global_step - 1
    # a subclass may override log_metrics, and a report shadows it
    is_stock = getattr(type(logger), "log_metrics", None) is TensorBoardLogger.log_metrics
    if is_stock and "log_metrics" not in vars(logger):
        log_event(logger, values, step)
    else:
        logger.log_metrics(values, step=step)


@rank_zero_only
def log_event(board: Any, values: Mapping[str, Any], step: int | None) -> None:
    """Log numbers with TensorBoard as one event.

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
    """Save numbers to the run's ``results.json`` and to a table on TensorBoard."""
    if not trainer.is_global_zero or not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    folder = Path(own_run_folder(trainer))
    before = logged_once(folder)
    kept = {**before, **numbers}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({n: v if math.isfinite(v) else None for n, v in kept.items()}, indent=1)
    unfinished = folder / f".{RESULTS}.unfinished"  # a killed run leaves no half file
    unfinished.write_text(text + "\n")
    unfinished.replace(folder / RESULTS)
    if news := {name: value for name, value in numbers.items() if before.get(name) != value}:
        for board in boards(trainer):
            board.experiment.add_text(f"results/{title}", table(news), trainer.global_step)


def logged_once(folder: Path) -> dict[str, float]:
    """Return the numbers in a run's ``results.json``, those of the test first."""
    path = folder / RESULTS
    kept = json.loads(path.read_text()) if path.exists() else {}
    numbers = {name: math.nan if value is None else float(value) for name, value in kept.items()}
    return dict(sorted(numbers.items(), key=lambda pair: not is_of_test(pair[0])))


def is_of_test(name: str) -> bool:
    """Return whether a name is that of a test metric."""
    return name.startswith("test")


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers."""
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


# prefixes of our metrics: TensorBoard sorts by name, and the user's val/ and train/ shall come first
_OURS = re.compile(
    r"(calibration|clients|global|head|local|mask|partition|personal|privacy|recalibration"
    r"|results|round|search|secure)(/|$)"
)


def board_tag(name: str) -> str:
    """Return a tag for TensorBoard, by which our own metrics and figures sort behind ``val/``.

    Example:
        >>> board_tag("round/seconds"), board_tag("val/loss")
        ('· round/seconds', 'val/loss')
    """
    return f"· {name}" if _OURS.match(name) else name


_FIGURES = "figures"


def log_figure(trainer: Trainer, name: str, draw: Callable[[], Figure], *, step: int) -> None:
    """Log a figure, or save it as a file where the logger shows none; in the first process only.

    Args:
        trainer: with the loggers; without one nothing is drawn.
        name: of the figure.
        draw: function that draws the figure; called at most once.
        step: of the run.
    """
    if not trainer.loggers:
        return
    figure = draw()
    shown = [_show(logger, name, figure, step) for logger in trainer.loggers]
    if not any(shown):
        path = Path(own_run_folder(trainer), _FIGURES, f"{_file(name)}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def log_histogram(trainer: Trainer, name: str, values: Tensor, *, step: int) -> None:
    """Log a histogram with those loggers that show histograms.

    Args:
        trainer: with the loggers.
        name: of the histogram.
        values: shape (n,).
        step: of the run; histograms of several steps stand one behind the other.
    """
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
            import wandb  # whose logger is there

            bins = min(64, max(8, len(finite) // 4))
            counts, edges = np.histogram(finite.numpy(), bins=bins)
            bars = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
            logger.experiment.log({name: bars})


def _show(logger: Any, name: str, figure: Figure, step: int) -> bool:
    """Log a figure; return whether the logger accepts figures."""
    kinds = _kinds(logger)
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_figure(board_tag(name), figure, step, close=False)
    elif "WandbLogger" in kinds:
        # W&B refuses steps that are behind those of numbers, and a round is a column there
        logger.log_image(key=name, images=[_pixels(figure)], caption=[f"step {step}"])
    elif "MLFlowLogger" in kinds:
        path = f"{_FIGURES}/{_file(name)}_{step}.png"
        logger.experiment.log_figure(logger.run_id, figure, path)
    elif "CometLogger" in kinds:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)
    elif hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[_pixels(figure)], step=step)
    else:
        return False
    return True


def _kinds(logger: Any) -> set[str]:
    """Return the names of a logger's class and of its bases."""
    return {kind.__name__ for kind in type(logger).__mro__}


def _pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """Return a figure as pixels, shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
