"""Numbers that a run logs once, as those of its test: a table on TensorBoard, not charts with one dot.

They are kept in ``results.json`` of the run's folder, and every other logger has them as it has all numbers.
A number that is not finite is null there.

Pictures and histograms for every logger that takes them, under the same name in each.

TensorBoard, W&B, MLflow and Comet have calls of their own. Of another logger a method
``log_image(key, images, step)`` is called, as Lightning names it. Where no logger takes pictures, as with
`lightning.pytorch.loggers.CSVLogger`, they are files: ``figures/<name>.png`` in the run's folder.
Loggers are known by the names of their classes: those of packages that are not installed need no import.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from fl_lightning.federation.checkpoints.run_folder import own_run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# groups of ours; TensorBoard sorts by name, and the user's own val/ and train/ come first this way
_OURS = re.compile(
    r"(calibration|clients|global|head|local|mask|partition|personal|predictor|privacy|recalibration"
    r"|results|round|search|secure)(/|$)"
)


def board_tag(name: str) -> str:
    """Name of a number or picture on TensorBoard, which sorts behind ``val/`` if it is one of ours.

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
        draw: makes it; is called once, if at all.
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
    """Log a histogram with loggers that show them; others log its numbers in tables.

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
        for kind, show in _HISTOGRAMS.items():
            if _is_a(logger, kind):
                show(logger.experiment, name, finite, step)


def _show(logger: Any, name: str, figure: Figure, step: int) -> bool:
    """Show a figure; return whether the logger takes any."""
    for kind, show in _PICTURES.items():
        if _is_a(logger, kind):
            show(logger, name, figure, step)
            return True
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[_pixels(figure)], step=step)
        return True
    return False


def _is_a(logger: Any, kind: str) -> bool:
    return any(parent.__name__ == kind for parent in type(logger).__mro__)


def _on_tensorboard(logger: Any, name: str, figure: Figure, step: int) -> None:
    logger.experiment.add_figure(board_tag(name), figure, step, close=False)


def _on_wandb(logger: Any, name: str, figure: Figure, step: int) -> None:
    # W&B refuses steps that are behind those of numbers, and a round is a column there
    logger.log_image(key=name, images=[_pixels(figure)], caption=[f"step {step}"])


def _on_mlflow(logger: Any, name: str, figure: Figure, step: int) -> None:
    logger.experiment.log_figure(logger.run_id, figure, f"{_FIGURES}/{_file(name)}_{step}.png")


def _on_comet(logger: Any, name: str, figure: Figure, step: int) -> None:
    logger.experiment.log_figure(figure_name=name, figure=figure, step=step)


def _histogram_on_wandb(experiment: Any, name: str, values: Tensor, step: int) -> None:
    import wandb  # whose logger is there

    counts, edges = np.histogram(values.numpy(), bins=min(64, max(8, len(values) // 4)))
    experiment.log({name: wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))})


_PICTURES: Mapping[str, Callable[[Any, str, Figure, int], None]] = {
    "TensorBoardLogger": _on_tensorboard,
    "WandbLogger": _on_wandb,
    "MLFlowLogger": _on_mlflow,
    "CometLogger": _on_comet,
}
_HISTOGRAMS: Mapping[str, Callable[[Any, str, Tensor, int], Any]] = {
    "TensorBoardLogger": lambda board, name, values, step: board.add_histogram(
        board_tag(name), values, step
    ),
    "WandbLogger": _histogram_on_wandb,
    "CometLogger": lambda comet, name, values, step: comet.log_histogram_3d(
        values.numpy(), name=name, step=step
    ),
}


def _pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """Return a figure as pixels, shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
