"""Report of a new mask: a line, numbers for the loggers, a figure, a file; and the bytes that it cost.

    calibration: 4 bytes · maskable entries · Σ over its rounds of the clients that score
    head:        8 bytes · numbers in a client's sums · rounds · clients with examples

Where clients find masks of their own, each tells its mask instead, see `ClientMasks.exchange`.

Scores travel in single precision, sums for a head in double. None of it is among ``round/bytes_up``.
In a central run nothing travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import log_figure, log_numbers, log_once, run_folder
from fl_lightning.reports.progress import federation_of
from fl_lightning.sparsity.heads import FittedHead
from fl_lightning.sparsity.masks.mask import Mask, save_mask
from fl_lightning.sparsity.masks.report import density_figure


@dataclass(frozen=True)
class MaskReport:
    """Summary of a mask.

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


_SINGLE, _DOUBLE = 4.0, 8.0


def calibration_bytes(num_entries: int, num_sent: int) -> dict[str, float]:
    """Return what each client sends in a round of calibration, and all clients in all rounds.

    Args:
        num_entries: that a mask covers.
        num_sent: how often a client sent its scores; 0 for rules without.

    Example:
        >>> calibration_bytes(num_entries=1000, num_sent=40)
        {'calibration/bytes_up': 4000.0, 'calibration/total_bytes_up': 160000.0}
    """
    each = _SINGLE * num_entries if num_sent else 0.0
    return {"calibration/bytes_up": each, "calibration/total_bytes_up": each * num_sent}


def head_bytes(trainer: Trainer, fitted: FittedHead) -> dict[str, float]:
    """Return what each client sends in a round of a head's fit, and all clients in all rounds."""
    if federation_of(trainer) is None:
        return {}
    num_examples = trainer.datamodule.clients.num_examples  # type: ignore[attr-defined]
    each = _DOUBLE * fitted.values_up
    total = each * fitted.rounds * int(np.count_nonzero(num_examples))
    return {"head/bytes_up": each, "head/total_bytes_up": total}
