"""A new mask, told: a line, numbers for the loggers, a figure, a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import log_numbers
from fl_lightning.federation.checkpoints.run_folder import run_folder
from fl_lightning.federation.loggers.once import log_once
from fl_lightning.federation.loggers.pictures import log_figure
from fl_lightning.sparsity.masks.mask import Mask, save_mask
from fl_lightning.sparsity.masks.report import density_figure


@dataclass(frozen=True)
class MaskReport:
    """What there is to tell.

    Attributes:
        mask: the mask.
        version: its number.
        origin: where it comes from, in words.
        num_dense: numbers of the head that train besides.
        num_frozen: numbers outside mask and head.
        metrics: further numbers for the loggers.
        is_new: False for a mask of a resumed run, which the loggers know.
        is_one_of_many: whether masks are found anew during the run, so that their numbers are curves.
    """

    mask: Mask
    version: int
    origin: str
    num_dense: int
    num_frozen: int
    metrics: dict[str, float]
    is_new: bool = True
    is_one_of_many: bool = False

    def __str__(self) -> str:
        mask = self.mask
        return (
            f"mask {self.version}: {mask.num_active:,} of {mask.num_entries:,} maskable parameters "
            f"train (density {mask.density:.4g}), {self.num_dense:,} densely, {self.num_frozen:,} "
            f"frozen; {self.origin}; hash {mask.hash()}"
        )

    def tell(self, trainer: Trainer) -> None:
        """Print, log and save it; to be called by all processes."""
        folder = run_folder(trainer)  # which processes agree on: all must ask
        rank_zero_info(str(self))
        if not trainer.is_global_zero or trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.is_new:
            self._log(trainer)
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_mask(self.mask, Path(folder) / f"mask_v{self.version}.safetensors")

    def _log(self, trainer: Trainer) -> None:
        numbers = {
            "mask/density": self.mask.density,
            "mask/sparsity": self.mask.sparsity,
            "mask/version": float(self.version),
            **self.metrics,
        }
        if self.is_one_of_many:
            log_numbers(trainer, numbers, step=trainer.global_step)
        else:
            log_once(trainer, "mask", numbers, step=trainer.global_step)
        log_figure(
            trainer,
            "mask/density per layer",
            lambda: density_figure(self.mask),
            step=trainer.global_step,
        )
