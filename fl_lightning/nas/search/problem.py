"""What a search that trains nothing is given, and what it returns.

    maximise score(architecture)   subject to constraints on cost(architecture)

Scores are dear and costs are cheap: a search has a budget of scores, each of a different architecture
that meets all constraints. It asks for costs as often as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.pictures import on_front
from fl_lightning.nas.search.constraints import Constraint, shown
from fl_lightning.nas.search.feasible import best_by_steps
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# how good an architecture is, higher is better; -inf: useless
Objective = Callable[[Architecture], float]
# what it costs: "flops", "params", "latency_ms", …
Costs = Callable[[Architecture], Mapping[str, float]]


@dataclass(frozen=True)
class Evaluated:
    """An architecture with its score and its costs."""

    architecture: Architecture
    score: float
    costs: Mapping[str, float]


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        evaluated: every architecture that was scored, in that order.
        budget: how many could have been.
    """

    evaluated: tuple[Evaluated, ...]
    budget: int

    @property
    def best(self) -> Evaluated:
        """The architecture of the highest score, the first of equals."""
        return max(self.evaluated, key=lambda one: one.score)

    def front(self, measure: str) -> list[Evaluated]:
        """Return the architectures that none beats in score and one cost, cheapest first.

        Args:
            measure: the name of the cost.
        """
        costs = [one.costs[measure] for one in self.evaluated]
        scores = [one.score for one in self.evaluated]
        useful = [number for number, score in enumerate(scores) if score > -math.inf]
        kept = on_front([costs[n] for n in useful], [scores[n] for n in useful])
        return [self.evaluated[useful[number]] for number in kept]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is searched for.

    Attributes:
        space: of the architectures.
        score: of an architecture; the same one always has the same score.
        cost: of an architecture.
        constraints: all must be met.
    """

    space: SearchSpace
    score: Objective
    cost: Costs
    constraints: tuple[Constraint, ...] = ()

    @cached_property
    def _costs(self) -> dict[tuple[int, ...], Mapping[str, float]]:
        return {}

    def costs(self, architecture: Architecture) -> Mapping[str, float]:
        """Return the costs, which are computed once for each architecture."""
        choices = architecture.choices
        if choices not in self._costs:
            self._costs[choices] = self.cost(architecture)
        return self._costs[choices]

    def excess(self, architecture: Architecture) -> float:
        """Return by how much the constraints are missed together; 0: all are met."""
        if not self.constraints:
            return 0.0
        costs = self.costs(architecture)
        return sum(constraint.excess(costs) for constraint in self.constraints)

    def is_met(self, architecture: Architecture) -> bool:
        """Return whether all constraints are met."""
        return self.excess(architecture) == 0

    def _towards(self, constraint: Constraint, architecture: Architecture) -> float:
        value = self.costs(architecture)[constraint.measure]
        return value if constraint.is_upper else -value

    def check(self) -> None:
        """Refuse constraints that no architecture meets.

        Raises:
            ConfigurationError: with the smallest cost that there is (or the largest).
        """
        for constraint in self.constraints:
            end = best_by_steps(self.space, partial(self._towards, constraint))
            if constraint.excess(self.costs(end)) > 0:
                word = "smallest" if constraint.is_upper else "largest"
                raise ConfigurationError(
                    f"constraint {constraint}: no network of {self.space.name} meets it; the {word} "
                    f"{constraint.measure} is {shown(self.costs(end)[constraint.measure])}, of {end}"
                )
        closest = best_by_steps(self.space, self.excess)
        if not self.is_met(closest):
            costs = ", ".join(
                f"{name} {shown(self.costs(closest)[name])}"
                for name in dict.fromkeys(one.measure for one in self.constraints)
            )
            raise ConfigurationError(
                f"constraints {', '.join(map(str, self.constraints))}: no network of "
                f"{self.space.name} was found that meets all; the closest has {costs}: {closest}"
            )


class Evaluations:
    """Scores of a search, up to its budget.

    Args:
        problem: of the search.
        budget: how many architectures may be scored, at least 1.

    Raises:
        ConfigurationError: if the budget is less, or no architecture meets the constraints.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        if budget < 1:
            raise ConfigurationError(f"budget must be at least 1 architecture, got {budget}")
        problem.check()
        self.problem, self.budget = problem, budget
        self._done: dict[tuple[int, ...], Evaluated] = {}

    @property
    def left(self) -> int:
        """How many more may be scored."""
        return self.budget - len(self._done)

    def knows(self, architecture: Architecture) -> bool:
        """Return whether it was scored already: to ask again costs nothing."""
        return architecture.choices in self._done

    def of(self, architecture: Architecture) -> Evaluated:
        """Return an architecture's score and costs.

        Args:
            architecture: that meets the constraints; a new one only while some are left.

        Raises:
            ValueError: if the score is no number.
        """
        if not self.knows(architecture):
            assert self.left > 0, "the budget is spent"
            score = float(self.problem.score(architecture))
            if math.isnan(score):
                raise ValueError(f"the score of {architecture} is not a number")
            costs = self.problem.costs(architecture)
            self._done[architecture.choices] = Evaluated(architecture, score, costs)
        return self._done[architecture.choices]

    def result(self) -> SearchResult:
        """Return what was scored."""
        return SearchResult(tuple(self._done.values()), self.budget)


def parse_constraints(texts: Sequence[str], measures: Sequence[str]) -> tuple[Constraint, ...]:
    """Read several constraints; see `Constraint.parse`."""
    return tuple(Constraint.parse(text, measures) for text in texts)
