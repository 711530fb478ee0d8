"""AttentiveNAS: a sandwich whose drawn sub-networks are the best, or the worst, of several of similar cost.

    L = CE(largest, y) + KD(smallest, largest) + Σ_i KD(s_i, largest),   s_i by `attentive_draw`

Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4: best of 50 by a predictor; the released configuration
has the best of 3 by the loss of the batch, which its authors found better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.elastic.attentive import (
    CostBins,
    Keep,
    attentive_draw,
    bins_by_cost,
    check_candidates,
)
from fl_lightning.nas.elastic.sandwich import sandwich
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.accuracy_predictor import AccuracyPredictor
from fl_lightning.nas.sub_networks.capability import CostOf, within
from fl_lightning.nas.sub_networks.methods import Method, Step, check_drawn, taught


@final
@dataclass(frozen=True)
class Attentive(Method):
    """AttentiveNAS: a sandwich of which the drawn ones are the best or the worst of their cost.

    Candidates are compared by what a predictor says of them, or without one by their loss on the
    step's batch, as published both. Where a client cannot afford one, its part within the limit is
    compared.

    Attributes:
        keep: the ``"best"`` or the ``"worst"``.
        num_candidates: of which one is kept, at least 1; published: 50 by a predictor, 3 by loss.
        num_drawn: how many are kept in a step, at least 0.
        num_bins: of multiply-adds.
        pool: how many sub-networks are drawn when a run begins, to count who falls into which bin.
        predictor: of accuracy; sub-networks are drawn uniformly until it begins.
    """

    keep: Keep = "best"
    num_candidates: int = 3
    num_drawn: int = 2
    num_bins: int = 25
    pool: int = 2000
    predictor: AccuracyPredictor | None = None

    def __post_init__(self) -> None:
        check_drawn(self.num_drawn, 0)
        check_candidates(self.keep, self.num_candidates)
        if self.pool < 1 or self.num_bins < 1:
            raise ConfigurationError(
                f"pool and num_bins must be at least 1, got {self.pool} and {self.num_bins}"
            )

    def loss(self, step: Step) -> Tensor:
        """Return the loss of the largest and of those that it teaches."""
        is_guided = self.predictor is None or step.predict is not None
        networks = sandwich(
            step.space,
            step.generator,
            num_drawn=self.num_drawn,
            draw=partial(self._draw, step) if is_guided else step.drawn,
            largest=step.limit,
        )
        return taught(step, networks)

    def _draw(self, step: Step, generator: torch.Generator) -> Architecture:
        """Return the best or the worst of a bin, cut to the step's limit."""

        def scores(candidates: Sequence[Architecture]) -> Sequence[float]:
            parts = [within(candidate, step.limit) for candidate in candidates]
            if step.predict is not None:
                return step.predict(parts)
            with torch.no_grad():
                return [-step.labels_loss(step.logits(part)).item() for part in parts]

        bins = _bins(step.space, step.cost, step.seed, self.pool, self.num_bins)
        drawn = attentive_draw(
            bins, scores, generator, keep=self.keep, num_candidates=self.num_candidates
        )
        return within(drawn, step.limit)


@lru_cache(maxsize=4)  # a pure function, and two seconds
def _bins(space: SizeSpace, cost: CostOf, seed: int, num_drawn: int, num_bins: int) -> CostBins:
    return bins_by_cost(space, cost, seed=seed, num_drawn=num_drawn, num_bins=num_bins)
