"""Options of a calibration: density after each round, rule, soft mask.

    keep_r = density^(r / R),   r = 1 … R          fraction of the maskable entries kept after round r
    θ ⊙ (m + s (1 - m))                            dropped entries become small instead of zero

Source: Iurada et al. 2025, ICLR (TaLoS), Algorithm 1, whose "final sparsity k" is this density, and
appendix A: s = 0.01; its released code uses 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.sparsity.calibration.rules import LeastSensitive, Rule
from fl_lightning.sparsity.masks.mask import Mask


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """Options of mask calibration: density, rule, number of rounds and so on.

    Args:
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, instead of density.
        rule: rule that selects the entries that train; `LeastSensitive` if None.
        rounds: number R of rounds, at least 1. Rules without scores always use one round.
        progressive: whether every round drops entries. If False, all rounds score without a mask, and the
            last one drops entries by the sum of the scores.
        soft_mask: factor of dropped entries while others are scored, in [0, 1]; 1 is off.
        per_tensor: whether every tensor has the same density, instead of one threshold over all.
    """

    density: float | None = None
    sparsity: float | None = None
    rule: Rule | None = None
    rounds: int = 4
    progressive: bool = True
    soft_mask: float = 0.01
    per_tensor: bool = False

    def __post_init__(self) -> None:
        resolve_density(self.density, self.sparsity)
        check_range("rounds of calibration", self.rounds, "at least 1")
        advice = ": dropped entries are multiplied by it while others are scored, 1 is off"
        check_range("soft_mask", self.soft_mask, "in [0, 1]", advice)

    @property
    def chosen_rule(self) -> Rule:
        """Rule that ranks the entries; `LeastSensitive` by default."""
        return self.rule or LeastSensitive()

    def num_kept(self, num_entries: int) -> list[int]:
        """Return how many entries are kept after each calibration round, at least 1 each."""
        density = resolve_density(self.density, self.sparsity)
        rounds = self.rounds if self.chosen_rule.needs_scores else 1
        kept = [max(1, round(num_entries * d)) for d in density_schedule(density, rounds)]
        return kept if self.progressive else [num_entries] * (rounds - 1) + kept[-1:]


def resolve_density(density: float | None, sparsity: float | None) -> float:
    """Return the density in (0, 1] of a user who gives the density, or the sparsity = 1 - density.

    Raises:
        ConfigurationError: if neither is given, one is out of range, or they contradict each other.

    Example:
        >>> resolve_density(None, 0.75)
        0.25
    """
    if density is None and sparsity is None:
        raise ConfigurationError(
            "give density, the fraction of entries that train, or sparsity = 1 - density"
        )
    check_range("density", density, "in (0, 1]", ": it is the fraction of entries that train")
    advice = ": it is the fraction of entries that do not train"
    check_range("sparsity", sparsity, "in [0, 1)", advice)
    if density is None:
        assert sparsity is not None
        return 1 - sparsity
    if sparsity is not None and not math.isclose(density + sparsity, 1, abs_tol=1e-9):
        raise ConfigurationError(
            f"sparsity {sparsity} and density {density} contradict each other, because their sum must be 1: give one"
        )
    return density


def density_schedule(density: float, rounds: int) -> list[float]:
    """Return the mask's density after each of R calibration rounds, falling geometrically to ``density``.

    Example:
        >>> [round(d, 6) for d in density_schedule(0.1, 4)]
        [0.562341, 0.316228, 0.177828, 0.1]
    """
    return [density ** (r / rounds) for r in range(1, rounds)] + [density]


def soften(parameters: Mapping[str, Tensor], mask: Mask, factor: float) -> dict[str, Tensor]:
    """Return copies of parameters by name, in which entries outside the mask are multiplied by a factor.

    Example:
        >>> weight = torch.tensor([2.0, 4.0])
        >>> soften({"weight": weight}, Mask({"weight": weight > 3}), 0.5)
        {'weight': tensor([1., 4.])}
    """
    return {
        name: torch.where(mask[name].to(tensor.device), tensor, tensor * factor)
        for name, tensor in parameters.items()
    }
