"""AttentiveNAS: draw several sub-networks of similar cost, train the one a predictor calls best or worst.

    a bin of FLOPs ~ how often uniform draws fall into it;   k sub-networks of this bin;
    BestUp: argmax of the predicted accuracy,   WorstUp: argmin

Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4.
Differs: sub-networks of a bin come from a pool that is drawn once, uniformly, from the run's seed;
theirs are drawn size by size from the pool's frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture

Predict = Callable[[Sequence[Architecture]], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Pool:
    """Sub-networks by bins of equal width of their cost; empty bins are left out.

    Attributes:
        bins: the sub-networks of each, by rising cost.
        edges: between bins, of the range of cost that was seen.
    """

    bins: tuple[tuple[Architecture, ...], ...]
    edges: tuple[float, ...]

    @property
    def shares(self) -> torch.Tensor:
        """How often uniform draws fall into each bin, (num_bins,)."""
        counts = torch.tensor([len(members) for members in self.bins], dtype=torch.float64)
        return counts / counts.sum()


def pool_by_cost(
    space: SizeSpace,
    cost: Callable[[Architecture], float],
    *,
    seed: int,
    num_drawn: int = 2000,
    num_bins: int = 25,
) -> Pool:
    """Return sub-networks drawn uniformly, by their cost.

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
    generator = torch_generator(seed, "attentive pool")
    drawn = [space.sample(generator) for _ in range(num_drawn)]
    costs = np.array([cost(architecture) for architecture in drawn], np.float64)
    edges = np.linspace(costs.min(), costs.max(), num_bins + 1)
    of_each = np.clip(np.searchsorted(edges, costs, "right") - 1, 0, num_bins - 1)
    members = [
        tuple(
            architecture for architecture, own in zip(drawn, of_each, strict=True) if own == number
        )
        for number in range(num_bins)
    ]
    return Pool(tuple(filter(None, members)), tuple(edges.tolist()))


@dataclass(frozen=True, eq=False)
class AttentiveDraw:
    """Draws as AttentiveNAS does; to hand to `sandwich` as its ``draw``.

    Attributes:
        pool: of sub-networks.
        predict: a number for each of several architectures: higher is better.
        keep: the ``"best"`` or the ``"worst"``.
        num_candidates: of which that is kept.
    """

    pool: Pool
    predict: Predict
    keep: Literal["best", "worst"] = "best"
    num_candidates: int = 50

    def __post_init__(self) -> None:
        if self.keep not in ("best", "worst"):
            raise ConfigurationError(f"keep must be best or worst, got {self.keep!r}")
        if self.num_candidates < 1:
            raise ConfigurationError(
                f"num_candidates must be at least 1, got {self.num_candidates}"
            )

    def __call__(self, generator: torch.Generator) -> Architecture:
        """Return the best or the worst of some of one bin."""
        number = int(torch.multinomial(self.pool.shares, 1, generator=generator))
        members = self.pool.bins[number]
        rows = torch.randint(len(members), (self.num_candidates,), generator=generator)
        candidates: list[Architecture] = [members[row] for row in rows.tolist()]
        scores = np.asarray(self.predict(candidates))
        return candidates[int(scores.argmax() if self.keep == "best" else scores.argmin())]


class ForestPredictor:
    """Predicts a number from choices: a random forest of 100 trees of depth 15, as published.

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
