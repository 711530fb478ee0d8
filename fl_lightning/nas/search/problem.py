"""Problem and result of a search that scores architectures one by one.

    maximise score(architecture)   subject to constraints on cost(architecture), e.g. ``latency_ms<=8``

Scores are expensive and costs are cheap. A search scores at most `budget` different architectures, all of
which meet the constraints; it may compute any number of costs.

The excess of a constraint is the relative difference between a cost and the bound, or 0 if the bound is
met. It has no unit, so that excesses of several constraints can be added.

Architectures that meet the constraints are drawn uniformly by rejection. If 30 draws in a row are rejected, the
last is changed towards the constraints, one decision at a time; such draws are not uniform.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# architecture -> score, higher is better; -inf for an unusable architecture
Objective = Callable[[Architecture], float]
# architecture -> costs by name: "flops", "params", "latency_ms", …
Costs = Callable[[Architecture], Mapping[str, float]]


@dataclass(frozen=True)
class Evaluated:
    """A scored architecture with its costs by name."""

    architecture: Architecture
    score: float
    costs: Mapping[str, float]


def on_front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Return the indices of the networks on the Pareto front of cost and score, cheapest first.

    Example:
        >>> on_front([3, 1, 2, 2], [0.9, 0.5, 0.4, 0.7])
        [1, 3, 0]
    """
    front: list[int] = []
    for number in sorted(range(len(costs)), key=lambda n: (costs[n], -scores[n])):
        if not front or scores[number] > scores[front[-1]]:
            front.append(number)
    return front


_CONSTRAINT = re.compile(r"\s*(\w+)\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Constraint:
    """Upper or lower bound on one cost of an architecture, such as ``flops<=4e7``.

    Attributes:
        measure: name of the cost.
        bound: bound in the unit of the cost, above 0.
        is_upper: True if the cost must be at most the bound, False if at least.

    Example:
        >>> constraint = Constraint.parse("flops <= 4e7", ["flops", "params"])
        >>> str(constraint), constraint.excess({"flops": 5e7})
        ('flops<=4e+07', 0.25)
    """

    measure: str
    bound: float
    is_upper: bool = True

    @classmethod
    def parse(cls, text: str, measures: Sequence[str]) -> Constraint:
        """Parse a cost constraint such as ``flops<=4e7``.

        Args:
            text: name of the cost, ``<=`` or ``>=``, bound.
            measures: names of the known costs.

        Raises:
            ConfigurationError: if the text is no constraint, or the cost is unknown.
        """
        pieces = _CONSTRAINT.fullmatch(text)
        measure, sign, number = pieces.groups() if pieces else ("", "", "")
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if measure not in measures or not 0 < bound < math.inf:
            advice = f"Costs are {', '.join(measures)}"
            if measure == "latency_ms":
                advice += "; latency_ms needs a file of fl-lightning latency (--latency)"
            raise ConfigurationError(
                f"constraint {text!r} must be a cost, <= or >=, and a number above 0, as in flops<=4e7. {advice}"
            )
        return cls(measure, bound, sign == "<=")

    def excess(self, costs: Mapping[str, float]) -> float:
        """Return how far the cost is beyond the bound, as a fraction of the bound; 0 if the constraint is met."""
        beyond = costs[self.measure] - self.bound
        return max(0.0, beyond if self.is_upper else -beyond) / self.bound

    def __str__(self) -> str:
        return f"{self.measure}{'<=' if self.is_upper else '>='}{self.bound:g}"


def shown(value: float) -> str:
    """Format a cost as text, with commas between thousands.

    Example:
        >>> shown(15647370), shown(3.14159)
        ('15,647,370', '3.14')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


@dataclass(frozen=True, eq=False)
class Problem:
    """Definition of an architecture search: search space, score to maximise, costs and constraints.

    Attributes:
        space: space of the architectures.
        score: returns the score of an architecture; must be deterministic.
        cost: returns the costs of an architecture, by name.
        constraints: constraints, all of which a scored architecture meets.
    """

    space: SearchSpace
    score: Objective
    cost: Costs
    constraints: tuple[Constraint, ...] = ()

    @cached_property
    def costs(self) -> Costs:
        """Function that returns an architecture's costs by name: `cost`, with cached results."""
        return cache(self.cost)

    def excess(self, architecture: Architecture) -> float:
        """Return how far an architecture violates the constraints, summed over them; 0 if all are met."""
        if not self.constraints:
            return 0.0
        costs = self.costs(architecture)
        return sum(constraint.excess(costs) for constraint in self.constraints)

    def is_met(self, architecture: Architecture) -> bool:
        """True if the architecture meets all constraints."""
        return self.excess(architecture) == 0

    def check(self) -> None:
        """Raise ConfigurationError if descent over decisions finds no architecture within the constraints."""
        closest = best_by_steps(self.space, self.excess)
        if not self.is_met(closest):
            costs = ", ".join(
                f"{name} {shown(self.costs(closest)[name])}"
                for name in dict.fromkeys(one.measure for one in self.constraints)
            )
            raise ConfigurationError(
                f"constraint {' and '.join(map(str, self.constraints))}: no network of {self.space.name} that meets it "
                f"was found; the closest has {costs}: {closest}. Relax the constraint"
            )


class SearchResult:
    """Architectures that a search has scored so far, at most `budget`.

    Args:
        problem: problem of the search.
        budget: largest number of architectures to score, at least 1.

    Raises:
        ConfigurationError: if the budget is below 1, or no architecture meets the constraints.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        check_range("budget", budget, "at least 1 architecture")
        problem.check()
        self.problem, self.budget = problem, budget
        self._done: dict[tuple[int, ...], Evaluated] = {}

    @property
    def left(self) -> int:
        """Number of architectures that the budget still allows to score."""
        return self.budget - len(self._done)

    def knows(self, architecture: Architecture) -> bool:
        """True if the search has already scored this architecture."""
        return architecture.choices in self._done

    def of(self, architecture: Architecture) -> Evaluated:
        """Return an architecture with its score and costs; score it first if it is new.

        Args:
            architecture: architecture that meets the constraints; known if `left` is 0.

        Raises:
            ValueError: if the score is NaN.
        """
        if not self.knows(architecture):
            assert self.left > 0, "the budget is spent"
            score = float(self.problem.score(architecture))
            if math.isnan(score):
                raise ValueError(
                    f"the score of {architecture} is NaN: return -inf for an unusable architecture"
                )
            costs = self.problem.costs(architecture)
            self._done[architecture.choices] = Evaluated(architecture, score, costs)
        return self._done[architecture.choices]

    @property
    def evaluated(self) -> tuple[Evaluated, ...]:
        """All scored architectures, in the order of scoring."""
        return tuple(self._done.values())

    @property
    def best(self) -> Evaluated:
        """Architecture with the highest score; the first scored if several are equal."""
        return max(self.evaluated, key=lambda one: one.score)

    def front(self, measure: str) -> list[Evaluated]:
        """Return the architectures on the Pareto front of the score and one cost, cheapest first."""
        costs = [one.costs[measure] for one in self.evaluated]
        scores = [one.score for one in self.evaluated]
        useful = [number for number, score in enumerate(scores) if score > -math.inf]
        kept = on_front([costs[n] for n in useful], [scores[n] for n in useful])
        return [self.evaluated[useful[number]] for number in kept]


UNIFORM_DRAWS = 30
# architecture -> distance from the constraints, 0 if all are met
Excess = Callable[[Architecture], float]


def best_by_steps(space: SearchSpace, loss: Callable[[Architecture], float]) -> Architecture:
    """Return an architecture of locally minimal loss: changing any single decision does not lower the loss.

    The minimum is global if the loss is a sum over decisions, as most costs are.
    """
    starts = [space.architecture([0] * len(space.decisions))]
    if isinstance(space, SizeSpace):
        starts.append(space.largest)
    ends = [_descended(start, loss, range(len(space.decisions))) for start in starts]
    return min(ends, key=loss)


def draw(space: SearchSpace, excess: Excess, generator: torch.Generator) -> Architecture | None:
    """Draw a random architecture that meets the constraints; None if this attempt found none."""
    drawn = space.sample(generator)
    for _ in range(UNIFORM_DRAWS):
        if excess(drawn) == 0:
            return drawn
        drawn = space.sample(generator)
    order = torch.randperm(len(space.decisions), generator=generator).tolist()
    walked = _descended(drawn, excess, order, enough=0)
    return walked if excess(walked) == 0 else None


def mutated(
    architecture: Architecture, probability: float, generator: torch.Generator
) -> Architecture:
    """Return a mutated copy of an architecture: each choice is redrawn with a given probability.

    Args:
        architecture: architecture to mutate.
        probability: probability in [0, 1] that a choice is redrawn.
        generator: generator of the draws.
    """
    space, choices = architecture.space, awake(architecture, generator)
    for index, decision in enumerate(space.decisions):
        if float(torch.rand((), generator=generator)) < probability:
            choices[index] = _drawn(len(decision.options), generator)
    return space.architecture(choices)


def with_one_change(architecture: Architecture, generator: torch.Generator) -> Architecture:
    """Return a copy of an architecture with one choice changed, at random among choices that have an effect."""
    space, choices = architecture.space, awake(architecture, generator)
    pairs = zip(space.decisions, space.active(architecture.choices), strict=True)
    open_ = [index for index, (one, active) in enumerate(pairs) if active and len(one.options) > 1]
    if not open_:
        return architecture
    index = open_[_drawn(len(open_), generator)]
    others = len(space.decisions[index].options) - 1
    choices[index] = (choices[index] + 1 + _drawn(others, generator)) % (others + 1)
    return space.architecture(choices)


def crossed(first: Architecture, second: Architecture, generator: torch.Generator) -> Architecture:
    """Return a uniform crossover of two architectures: each choice comes from either parent at random."""
    pairs = list(zip(awake(first, generator), awake(second, generator), strict=True))
    sides = torch.randint(2, (len(pairs),), generator=generator).tolist()
    return first.space.architecture([pair[side] for pair, side in zip(pairs, sides, strict=True)])


def awake(architecture: Architecture, generator: torch.Generator) -> list[int]:
    """Return an architecture's choices, with random values for choices that have no effect.

    Choices in blocks beyond the depth of a stage have no effect and are 0. A mutation that makes the stage
    deeper would otherwise always add the smallest block.
    """
    space, choices = architecture.space, list(architecture.choices)
    for index, active in enumerate(space.active(choices)):
        if not active:
            choices[index] = _drawn(len(space.decisions[index].options), generator)
    return choices


def _descended(
    start: Architecture,
    loss: Callable[[Architecture], float],
    order: Sequence[int],
    enough: float = -math.inf,
) -> Architecture:
    """Lower a loss by changing one decision at a time, until no change helps or the loss is at most `enough`."""
    best, lowest = start, loss(start)
    space, moved = start.space, True
    while moved and lowest > enough:
        moved = False
        for index in order:
            for option in range(len(space.decisions[index].options)):
                choices = list(best.choices)
                choices[index] = option
                changed = space.architecture(choices)
                if (value := loss(changed)) < lowest:
                    best, lowest, moved = changed, value, True
    return best


def _drawn(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))
