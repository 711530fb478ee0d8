"""How a mask is found: everything about a calibration but the model and its scores."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.calibration.density import density_schedule, resolve_density
from fl_lightning.sparsity.calibration.rules import LeastSensitive, Rule


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """Options of a calibration.

    Args:
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, instead of it.
        rule: which entries are kept; None is the least sensitive.
        rounds: R ≥ 1; 1 is one-shot. Rules without scores need one round whatever this says.
        progressive: False scores R times without masking anything, adds up, and drops once.
        soft_mask: factor of dropped entries while others are scored, in [0, 1]; 1 is off.
        per_tensor: one threshold a tensor, all with the same density, instead of a global one.

    Raises:
        ConfigurationError: if an option is out of range.
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
        if self.rounds < 1:
            raise ConfigurationError(f"rounds of calibration must be at least 1, got {self.rounds}")
        if not 0 <= self.soft_mask <= 1:
            raise ConfigurationError(
                f"soft_mask must be in [0, 1], got {self.soft_mask}: dropped entries are "
                "multiplied by it while the others are scored. 1 leaves them as they are."
            )

    @property
    def chosen_rule(self) -> Rule:
        """The rule, or the one that None stands for."""
        return self.rule or LeastSensitive()

    def num_kept(self, num_entries: int) -> list[int]:
        """Return how many entries are kept after each round; at least one."""
        density = resolve_density(self.density, self.sparsity)
        rounds = self.rounds if self.chosen_rule.needs_scores else 1
        kept = [max(1, round(num_entries * d)) for d in density_schedule(density, rounds)]
        return kept if self.progressive else [num_entries] * (rounds - 1) + kept[-1:]
