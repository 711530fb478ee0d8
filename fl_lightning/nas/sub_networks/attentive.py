"""AttentiveNAS: a sandwich whose sub-networks are the best, or the worst, of several of similar cost.

    L = CE(largest, y) + KD(smallest, largest) + Σ_i KD(s_i, largest),   s_i by `attentive_draw`:

    bin t ~ how often uniform draws fall into it
    k candidates, each:  size i ~ how often uniform draws of bin t have each option of it,
                         drawn anew until the cost falls into bin t, at most 100 times more
    BestUp: argmax of the predicted accuracy,   WorstUp: argmin

Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4: best of 50 by a predictor; the released configuration
has the best of 3 by the loss of the batch, which its authors found better, and its code the 100.
Differs: the bins cut the range of costs that was seen into equal ones; theirs are 25 million multiply-adds wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import check_range
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.accuracy import AccuracyPredictor
from fl_lightning.nas.sub_networks.capability import within
from fl_lightning.nas.sub_networks.methods import (
    Method,
    Predict,
    Step,
    sandwich,
    taught,
)

Keep = Literal["best", "worst"]


_MORE_TRIALS = 100  # then a candidate of another bin is taken, as in the released code


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
        check_range("num_drawn", self.num_drawn, "at least 0")
        for name in ("num_candidates", "pool", "num_bins"):
            check_range(name, getattr(self, name), "at least 1")

    @override
    def loss(self, step: Step) -> Tensor:
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

        bins = bins_by_cost(
            step.space, step.cost, seed=step.seed, num_drawn=self.pool, num_bins=self.num_bins
        )
        drawn = attentive_draw(
            bins, scores, generator, keep=self.keep, num_candidates=self.num_candidates
        )
        return within(drawn, step.limit)


@dataclass(frozen=True, eq=False)
class CostBins:
    """Shares of uniformly drawn sub-networks in each bin of cost, and their options.

    Attributes:
        space: of the sub-networks.
        cost: of an architecture.
        edges: of the bins, (num_bins + 1,), rising; what costs less or more is in the outer ones.
        shares: how often draws fall into each bin, (num_bins,).
        options: how often draws of a bin have each option of each size, (num_bins, num_sizes,
            num_options); rows of sizes with fewer options end in 0.
    """

    space: SizeSpace
    cost: Callable[[Architecture], float]
    edges: Tensor
    shares: Tensor
    options: Tensor

    def of(self, cost: float) -> int:
        """Return the bin of a cost."""
        return int(_bins(torch.tensor([cost], dtype=torch.float64), self.edges))

    def draw(self, number: int, generator: torch.Generator) -> Architecture:
        """Return a sub-network of a bin; of any bin where 101 draws miss it."""
        for _ in range(1 + _MORE_TRIALS):
            choices = torch.multinomial(self.options[number], 1, generator=generator)
            drawn = self.space.architecture(choices.flatten().tolist())
            if self.of(self.cost(drawn)) == number:
                break
        return drawn


@lru_cache(maxsize=4)  # a pure function, and two seconds
def bins_by_cost(
    space: SizeSpace,
    cost: Callable[[Architecture], float],
    *,
    seed: int,
    num_drawn: int = 2000,
    num_bins: int = 25,
) -> CostBins:
    """Draw sub-networks uniformly and count how many fall into each bin of cost.

    Args:
        space: of sizes.
        cost: of an architecture, e.g. its FLOPs.
        seed: of the run.
        num_drawn: how many.
        num_bins: into how many the range from the cheapest to the dearest is cut.
    """
    generator = torch_generator(seed, "attentive bins")
    num_options = [len(decision.options) for decision in space.decisions]
    columns = [torch.randint(n, (num_drawn,), generator=generator) for n in num_options]
    drawn = torch.stack(columns, 1)
    costs = [cost(space.architecture(choices)) for choices in drawn.tolist()]
    found = torch.tensor(costs, dtype=torch.float64)
    edges = torch.linspace(
        float(found.min()), float(found.max()), num_bins + 1, dtype=torch.float64
    )
    of_each = _bins(found, edges)
    options = torch.zeros(num_bins, len(num_options), max(num_options), dtype=torch.float64)
    for size in range(len(num_options)):
        options[:, size].index_put_(
            (of_each, drawn[:, size]), torch.ones(num_drawn, dtype=torch.float64), accumulate=True
        )
    counts = torch.bincount(of_each, minlength=num_bins).double()
    return CostBins(
        space, cost, edges, counts / num_drawn, options / counts.clamp(min=1)[:, None, None]
    )


def _bins(costs: Tensor, edges: Tensor) -> Tensor:
    """Return the number of the bin of each cost."""
    return (torch.bucketize(costs, edges, right=True) - 1).clamp(0, len(edges) - 2)


def attentive_draw(
    bins: CostBins,
    predict: Predict,
    generator: torch.Generator,
    *,
    keep: Keep = "best",
    num_candidates: int = 50,
) -> Architecture:
    """Return the best or the worst of some sub-networks of one bin, of equals the first.

    Args:
        bins: of the space.
        predict: a number for each of several architectures: higher is better.
        generator: of the draws.
        keep: the ``"best"`` or the ``"worst"``.
        num_candidates: of which that is kept.
    """
    number = int(torch.multinomial(bins.shares, 1, generator=generator))
    candidates = [bins.draw(number, generator) for _ in range(num_candidates)]
    scores = np.asarray(predict(candidates))
    return candidates[int(scores.argmax() if keep == "best" else scores.argmin())]
