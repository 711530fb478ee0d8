"""Pictures and histograms for every logger that takes them, under the same name in each.

TensorBoard, W&B, MLflow and Comet have calls of their own. Of another logger a method
``log_image(key, images, step)`` is called, as Lightning names it. Where no logger takes pictures, as with
`lightning.pytorch.loggers.CSVLogger`, they are files: ``figures/<name>.png`` in the run's folder.
Loggers are known by the names of their classes: those of packages that are not installed need no import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.federation.checkpoints.run_folder import own_run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES = "figures"


def log_figure(trainer: Trainer, name: str, draw: Callable[[], Figure], *, step: int) -> None:
    """Have loggers show a figure, or leave it as a file; for the first process alone.

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
    """Have loggers that know histograms show one; the others have its numbers in tables.

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
    logger.experiment.add_figure(name, figure, step, close=False)


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
    "TensorBoardLogger": lambda board, name, values, step: board.add_histogram(name, values, step),
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
