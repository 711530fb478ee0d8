"""An update is clipped as one flat ball, over all coordinates that travel.

    Δ ← Δ · min(1, S / ‖Δ‖₂)

Source: McMahan et al. 2018 (1710.06963), Section 2.2, "flat clipping".
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(delta: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Return a vector of at most the clip norm, and whether it was within it before.

    Args:
        delta: finite, shape (k,).
        clip_norm: S > 0; ∞ leaves every bit as it is.

    Returns:
        The clipped vector, shape (k,), and a bool scalar.

    Example:
        >>> clipped(torch.tensor([3.0, 4.0]), clip_norm=1.0)
        (tensor([0.6000, 0.8000]), tensor(False))
        >>> clipped(torch.tensor([3.0, 4.0]), clip_norm=5.0)
        (tensor([3., 4.]), tensor(True))
    """
    wide = torch.float32 if delta.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(delta, dtype=wide)
    scale = (clip_norm / norm).clamp(max=1.0)  # of a zero vector ∞
    return delta * scale.to(delta.dtype), norm <= clip_norm
