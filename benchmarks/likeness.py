"""How like the truth the images are that an attack finds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Attacked:
    """What came out for one client.

    Attributes:
        true: images, pixels in [0, 1], shape (m, 1, 8, 8).
        found: by the attack, likewise.
        typical: the mean digit of each label, likewise.
    """

    true: Tensor
    found: Tensor
    typical: Tensor

    @property
    def correlation(self) -> float:
        """Mean over the images of the partial correlation of pixels, given the typical digit."""
        return mean(map(partial_correlation, self.true, self.found, self.typical))

    @property
    def decibels(self) -> float:
        """Peak signal-to-noise ratio of all images, at most 99."""
        error = float(functional.mse_loss(self.found, self.true))
        return min(99.0, -10 * math.log10(max(error, 1e-12)))


def partial_correlation(one: Tensor, other: Tensor, given: Tensor) -> float:
    """Return the correlation of what a third image and a constant do not explain of two.

    It is 0 where they explain one of them wholly.

    Example:
        >>> one, other = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([5.0, 1.0, 1.0, 5.0])
        >>> round(partial_correlation(one, other, torch.tensor([0.0, 0.0, 1.0, 1.0])), 6)
        1.0
        >>> partial_correlation(one, other, given=one)
        0.0
    """
    known = torch.stack([torch.ones_like(given.flatten()), given.flatten()], 1).double()
    basis = torch.linalg.qr(known).Q

    def rest(image: Tensor) -> Tensor:
        image = image.flatten().double()
        left = image - basis @ (basis.T @ image)
        return left if left.norm() > 1e-6 * image.norm() else torch.zeros_like(left)

    return float(functional.cosine_similarity(rest(one), rest(other), dim=0))
