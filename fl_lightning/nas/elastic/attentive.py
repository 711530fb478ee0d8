"""AttentiveNAS: draw several sub-networks of similar cost, train the one a predictor calls best or worst.

    bin t ~ how often uniform draws fall into it
    k candidates, each:  size i ~ how often uniform draws of bin t have each option of it,
                         drawn anew until the cost falls into bin t, at most 100 times more
    BestUp: argmax of the predicted accuracy,   WorstUp: argmin

Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4, and its released code for the 100.
Differs: the bins cut the range of costs that was seen into equal ones; theirs are 25 million multiply-adds wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture

Keep = Literal["best", "worst"]
Predict = Callable[[Sequence[Architecture]], Sequence[float]]

_MORE_TRIALS = 100  # then a candidate of another bin is taken, as in the released code


@dataclass(frozen=True, eq=False)
class CostBins:
    """How uniform draws of a space spread over bins of their cost; `bins_by_cost` counts.

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


def bins_by_cost(
    space: SizeSpace,
    cost: Callable[[Architecture], float],
    *,
    seed: int,
    num_drawn: int = 2000,
    num_bins: int = 25,
) -> CostBins:
    """Draw sub-networks uniformly and count.

    Args:
        space: of sizes.
        cost: of an architecture, e.g. its FLOPs.
        seed: of the run.
        num_drawn: how many.
        num_bins: into how many the range from the cheapest to the dearest is cut.

    Raises:
        ConfigurationError: if one of the numbers is not positive.
    """
    if num_drawn < 1 or num_bins < 1:
        raise ConfigurationError(
            f"num_drawn and num_bins must be at least 1, got {num_drawn} and {num_bins}"
        )
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


def check_candidates(keep: str, num_candidates: int) -> None:
    """Refuse what is neither best nor worst, or of nobody.

    Raises:
        ConfigurationError: with the value.
    """
    if keep not in ("best", "worst"):
        raise ConfigurationError(f"keep must be best or worst, got {keep!r}")
    if num_candidates < 1:
        raise ConfigurationError(f"num_candidates must be at least 1, got {num_candidates}")


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


class ForestPredictor:
    """Predicts a number from choices: a random forest, as published; its 100 trees of depth 15 are ours.

    Args:
        architectures: of one space.
        scores: of each, e.g. its accuracy on examples that no test uses.
        seed: of the run.

    Raises:
        ConfigurationError: if there are not as many scores as architectures, or none.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> predict = ForestPredictor([space.smallest, space.largest], [0.1, 0.9], seed=0)
        >>> worse, better = predict([space.smallest, space.largest])
        >>> bool(worse < better)
        True
    """

    def __init__(
        self, architectures: Sequence[Architecture], scores: Sequence[float], *, seed: int
    ) -> None:
        if not architectures or len(architectures) != len(scores):
            raise ConfigurationError(
                f"a predictor needs a score for each architecture, and one at least; got "
                f"{len(architectures)} architectures and {len(scores)} scores"
            )
        state = derive_seed(seed, "predictor") % 2**32
        from sklearn.ensemble import RandomForestRegressor  # slow to import, and few need it

        self._forest: Any = RandomForestRegressor(100, max_depth=15, random_state=state)
        self._forest.fit(_features(architectures), np.asarray(scores, np.float64))

    def __call__(self, architectures: Sequence[Architecture]) -> list[float]:
        """Return a prediction for each."""
        predicted: list[float] = self._forest.predict(_features(architectures)).tolist()
        return predicted


def _features(architectures: Sequence[Architecture]) -> npt.NDArray[np.int64]:
    """The choices; -1 for what has no effect, which is less than any option."""
    rows = []
    for architecture in architectures:
        choices = np.array(architecture.choices)
        space = architecture.space
        if isinstance(space, SizeSpace):
            choices[~np.array(space.active(architecture.choices))] = -1
        rows.append(choices)
    return np.stack(rows)
