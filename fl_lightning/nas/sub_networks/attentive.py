"""AttentiveNAS: a sandwich whose drawn sub-networks are the best, or the worst, of several of similar cost.

    losses as in `Sandwich`:  CE(largest, y), KD(smallest, largest), KD(s_i, largest)

    draw a bin of costs, with the frequency of uniformly drawn sub-networks in it
    draw k candidates, every option with its frequency in the bin, until the cost of each is in the bin
    s_i = the candidate with the lowest loss on the step's batch (BestUp), or the highest (WorstUp)

Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4, and its released configuration: the best of 3 by the
loss of the batch, which its authors found better than the best of 50 by a predictor.
Differs: bins divide the range of costs into equal parts; in the paper they are 25 million multiply-adds wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import check_range
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.sub_networks.capability import within
from fl_lightning.nas.sub_networks.methods import Method, Step, sandwich_loss

Keep = Literal["best", "worst"]

_MORE_DRAWS = 100  # then a candidate of another bin is used, as in the released code


@final
@dataclass(frozen=True)
class Attentive(Method):
    """AttentiveNAS: the sandwich rule, where each drawn sub-network is the best or worst of several of similar cost.

    Candidates are cut to the largest network that the client can afford, and compared by their loss on the
    step's batch.

    Attributes:
        keep: candidate that trains, ``"best"`` or ``"worst"``.
        num_candidates: number of candidates of which one trains, at least 1.
        num_drawn: number of sub-networks per step that train beside the largest and the smallest, at
            least 0.
        num_bins: number of bins of multiply-adds, at least 1.
        pool: number of uniformly drawn sub-networks from which the histogram is made, at least 1.
    """

    keep: Keep = "best"
    num_candidates: int = 3
    num_drawn: int = 2
    num_bins: int = 25
    pool: int = 2000

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 0")
        for name in ("num_candidates", "pool", "num_bins"):
            check_range(name, getattr(self, name), "at least 1")

    @override
    def loss(self, step: Step) -> Tensor:
        sizes = {"num_drawn": self.pool, "num_bins": self.num_bins}
        bins = bins_by_flops(step.networks, seed=step.seed, **sizes)
        drawn = [self._kept(bins, step) for _ in range(self.num_drawn)]
        return sandwich_loss(step, drawn)

    def _kept(self, bins: CostBins, step: Step) -> Architecture:
        """Draw a cost bin and candidates from it; return the candidate with the lowest (or highest) loss."""
        number = int(torch.multinomial(bins.shares, 1, generator=step.generator))
        drawn = [bins.draw(number, step.generator) for _ in range(self.num_candidates)]
        candidates = [within(candidate, step.limit) for candidate in drawn]
        with torch.no_grad():
            losses = [step.labels_loss(step.logits(one)).item() for one in candidates]
        best = min if self.keep == "best" else max
        return candidates[losses.index(best(losses))]


class CostBins:
    """Histogram of random sub-networks' costs; for each bin, how often its sub-networks have each option.

    Args:
        space: space of the sub-networks.
        cost: returns the cost of an architecture, e.g. its FLOPs.
        seed: seed of the draws.
        num_drawn: number of drawn sub-networks.
        num_bins: number of equal bins between the lowest and the highest drawn cost.

    Attributes:
        edges: rising edges of the bins, shape (num_bins + 1,); costs outside belong to the outer bins.
        shares: fraction of the draws in each bin, shape (num_bins,).
        options: fraction of the draws of a bin that have an option of a decision, shape (num_bins,
            num_decisions, num_options); 0 for options that a decision lacks.
    """

    def __init__(
        self,
        space: SizeSpace,
        cost: Callable[[Architecture], float],
        *,
        seed: int,
        num_drawn: int = 2000,
        num_bins: int = 25,
    ) -> None:
        self.space, self.cost = space, cost
        generator = torch_generator(seed, "attentive bins")
        num_options = [len(decision.options) for decision in space.decisions]
        columns = [torch.randint(n, (num_drawn,), generator=generator) for n in num_options]
        drawn = torch.stack(columns, 1)
        costs = [cost(space.architecture(choices)) for choices in drawn.tolist()]
        self.edges = torch.linspace(min(costs), max(costs), num_bins + 1, dtype=torch.float64)
        of_each = self._bins(costs)
        counts = torch.bincount(of_each, minlength=num_bins).double()
        self.shares = counts / num_drawn
        one_hot = torch.nn.functional.one_hot(drawn, max(num_options)).double()
        sums = torch.zeros(num_bins, *one_hot.shape[1:], dtype=torch.float64)
        self.options = sums.index_add(0, of_each, one_hot) / counts.clamp(min=1)[:, None, None]

    def _bins(self, costs: Sequence[float]) -> Tensor:
        found = torch.bucketize(torch.tensor(costs, dtype=torch.float64), self.edges, right=True)
        return (found - 1).clamp(0, len(self.edges) - 2)

    def of(self, cost: float) -> int:
        """Return the index of the bin that contains a cost."""
        return int(self._bins([cost]))

    def draw(self, number: int, generator: torch.Generator) -> Architecture:
        """Draw a sub-network whose cost is in a bin; after 101 failed draws return one of another bin."""
        for _ in range(1 + _MORE_DRAWS):
            choices = torch.multinomial(self.options[number], 1, generator=generator)
            drawn = self.space.architecture(choices.flatten().tolist())
            if self.of(self.cost(drawn)) == number:
                break
        return drawn


@lru_cache(maxsize=4)  # a pure function that takes two seconds
def bins_by_flops(networks: Networks, **options: int) -> CostBins:
    """Return a histogram of random sub-networks by multiply-adds."""
    space: Any = networks.space
    return CostBins(space, lambda one: networks.cost(one).flops, **options)
