"""Random search: draw architectures, keep the best. What every other search must beat.

Source: Li & Talwalkar 2019, "Random search and reproducibility for NAS".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.search.feasible import draw
from fl_lightning.nas.search.problem import Evaluations, Problem, SearchResult
from fl_lightning.nas.search.strategy import Strategy, new


@final
@dataclass(frozen=True)
class RandomSearch(Strategy):
    """Different architectures, drawn uniformly; under tight constraints see `feasible.draw`.

    Example:
        >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
        >>> skips = lambda cell: cell.options.count("skip_connect")
        >>> problem = Problem(NASBench201(), skips, lambda cell: {"skips": skips(cell)})
        >>> len(RandomSearch().search(problem, budget=20, seed=1).evaluated)
        20
    """

    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score as many architectures as the budget says."""
        evaluations = Evaluations(problem, budget)
        generator = torch_generator(seed, "random search")
        while evaluations.left > 0:
            drawn = new(lambda: draw(problem.space, problem.excess, generator), evaluations)
            if drawn is None:
                break
            evaluations.of(drawn)
        return evaluations.result()
