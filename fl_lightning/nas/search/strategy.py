"""What every search that trains nothing is: a way to spend a budget of scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from fl_lightning.nas.search.problem import Evaluations, Problem, SearchResult
from fl_lightning.nas.spaces.space import Architecture

# draws in a row that bring nothing new before a search ends: it has seen what there is
MOST_IN_VAIN = 300


class Strategy(ABC):
    """A search; the same problem, budget and seed give the same result."""

    @abstractmethod
    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score up to ``budget`` different architectures that meet the constraints.

        There are fewer where no more are found, in a small space or under tight constraints.

        Args:
            problem: to solve.
            budget: at least 1.
            seed: of all draws.

        Raises:
            ConfigurationError: if no architecture meets the constraints.
        """


def new(
    propose: Callable[[], Architecture | None], evaluations: Evaluations
) -> Architecture | None:
    """Return the first proposal that meets the constraints and was not scored; None: there is none.

    Args:
        propose: returns an architecture, or None where this attempt found none.
        evaluations: so far.
    """
    for _ in range(MOST_IN_VAIN):
        proposed = propose()
        if proposed is None or evaluations.knows(proposed):
            continue
        if evaluations.problem.is_met(proposed):
            return proposed
    return None
