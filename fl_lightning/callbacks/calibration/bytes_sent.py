"""What clients send once, ahead of training: scores of a calibration, sums of a head's fit.

    calibration: 4 bytes · maskable entries · Σ over its rounds of the clients that score
    head:        8 bytes · numbers in a client's sums · rounds · clients with examples

Where clients find masks of their own, each tells its mask instead, see `ClientMasks.exchange`.

Scores travel in single precision, sums for a head in double. None of it is among ``round/bytes_up``.
In a central run nothing travels.
"""

from __future__ import annotations

import numpy as np
from lightning.pytorch import Trainer

from fl_lightning.callbacks.calibration.owners import federation_of
from fl_lightning.sparsity.heads import FittedHead

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
