"""Dropped entries made small instead of zero: θ ⊙ (m + s (1 - m)).

Source: Iurada et al. 2025, ICLR (TaLoS), appendix A: s = 0.01; its released code uses 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.sparsity.masks.mask import Mask


def soften(parameters: Mapping[str, Tensor], mask: Mask, factor: float) -> dict[str, Tensor]:
    """Return parameters with the entries outside the mask times a factor, as new tensors.

    Example:
        >>> weight = torch.tensor([2.0, 4.0])
        >>> soften({"weight": weight}, Mask({"weight": weight > 3}), 0.5)
        {'weight': tensor([1., 4.])}
    """
    return {
        name: torch.where(mask[name].to(tensor.device), tensor, tensor * factor)
        for name, tensor in parameters.items()
    }
