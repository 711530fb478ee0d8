"""Report of a new mask: a line, numbers for the loggers, a figure, a file; and the bytes that it cost.

    calibration: 4 bytes · maskable entries · Σ over its rounds of the clients that score
    head:        8 bytes · numbers in a client's sums · rounds · clients with examples

Where clients find masks of their own, each tells its mask instead, see `ClientMasks.exchange`.

Scores travel in single precision, sums for a head in double. None of it is among ``round/bytes_up``.
In a central run nothing travels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import log_figure, log_numbers, log_once, run_folder
from fl_lightning.reports.progress import federation_of
from fl_lightning.sparsity.heads import FittedHead
from fl_lightning.sparsity.masks.mask import Mask, save_mask
from fl_lightning.sparsity.masks.report import density_figure


def report_mask(
    trainer: Trainer,
    mask: Mask,
    version: int,
    words: str,
    metrics: dict[str, float] | None,
    *,
    is_one_of_many: bool,
) -> None:
    """Print, log and save a mask; to be called by all processes.

    Args:
        trainer: with the loggers.
        mask: the mask.
        version: its number.
        words: what is said of it.
        metrics: further numbers for the loggers; None for a mask of a resumed run, which they know.
        is_one_of_many: whether masks are found anew during the run, so that their numbers are curves.
    """
    folder = run_folder(trainer)  # which processes agree on: all must ask
    rank_zero_info(words)
    if not trainer.is_global_zero or trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    step = trainer.global_step
    if metrics is not None:
        numbers = {
            "mask/density": mask.density,
            "mask/sparsity": mask.sparsity,
            "mask/version": float(version),
            **metrics,
        }
        if is_one_of_many:
            log_numbers(trainer, numbers, step=step)
        else:
            log_once(trainer, "mask", numbers, step=step)
        log_figure(trainer, "mask/density per layer", lambda: density_figure(mask), step=step)
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_mask(mask, Path(folder) / f"mask_v{version}.safetensors")


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
