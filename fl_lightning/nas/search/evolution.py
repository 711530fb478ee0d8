"""Evolution: networks of a population have children; good ones have more.

Regularized evolution: of S members drawn from P, the best has a child with one choice changed; the
child enters the population, the oldest member leaves it.
Source: Real et al. 2019, AAAI; on NAS-Bench-201 Dong & Yang 2020 (P = 10, S = 3).

Once-for-All's: of a generation, the best quarter are parents; the next generation is the parents,
mutated parents (each choice drawn anew with probability 0.1), and crossed pairs of parents.
Source: Cai et al. 2020, ICLR, section 3.3, and its code (`EvolutionFinder`).

Differs: every child meets the constraints and is new, so that a budget is a number of networks. In
the second search children are drawn until they do; the best of all that were scored are the parents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.search.feasible import crossed, draw, mutated, with_one_change
from fl_lightning.nas.search.problem import Evaluated, Evaluations, Problem, SearchResult
from fl_lightning.nas.search.strategy import Strategy, new
from fl_lightning.nas.spaces.space import Architecture


@final
@dataclass(frozen=True)
class RegularizedEvolution(Strategy):
    """Regularized evolution.

    Attributes:
        population: P, how many members there are, at least 2.
        tournament: S, of how many the best has a child, in 1 to P.
    """

    population: int = 10
    tournament: int = 3

    def __post_init__(self) -> None:
        if self.population < 2 or not 1 <= self.tournament <= self.population:
            raise ConfigurationError(
                "regularized evolution needs a population of at least 2 and a tournament of 1 to "
                f"population, got {self.population} and {self.tournament}"
            )

    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score as many architectures as the budget says."""
        evaluations = Evaluations(problem, budget)
        generator = torch_generator(seed, "regularized evolution")
        alive = deque(_first(evaluations, self.population, generator), maxlen=self.population)

        def child() -> Architecture:
            drawn = torch.randperm(len(alive), generator=generator)[: self.tournament]
            parent = max((alive[i] for i in drawn.tolist()), key=lambda one: one.score)
            return with_one_change(parent.architecture, generator)

        while evaluations.left > 0:
            born = _child(child, evaluations, generator)
            if born is None:
                break
            alive.append(evaluations.of(born))  # the oldest leaves
        return evaluations.result()


@final
@dataclass(frozen=True)
class Evolution(Strategy):
    """Once-for-All's evolutionary search.

    Attributes:
        population: of a generation, at least 4.
        parents: share of a generation that has children, in (0, 1].
        mutants: share of the children that are mutated; the others are crossed, in [0, 1].
        mutation: probability that a choice of a mutated child is drawn anew, in (0, 1].

    Example:
        >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
        >>> skips = lambda cell: cell.options.count("skip_connect")
        >>> problem = Problem(NASBench201(), skips, lambda cell: {"skips": skips(cell)})
        >>> Evolution(population=20).search(problem, budget=200).best.score
        6.0
    """

    population: int = 40
    parents: float = 0.25
    mutants: float = 0.5
    mutation: float = 0.1

    def __post_init__(self) -> None:
        shares = 0 < self.parents <= 1 and 0 <= self.mutants <= 1 and 0 < self.mutation <= 1
        if self.population < 4 or not shares:
            raise ConfigurationError(
                "evolution needs a population of at least 4, parents and mutation in (0, 1] and "
                f"mutants in [0, 1], got {self.population}, {self.parents}, {self.mutation} and "
                f"{self.mutants}"
            )

    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score as many architectures as the budget says."""
        evaluations = Evaluations(problem, budget)
        generator = torch_generator(seed, "evolution")
        num_parents = max(2, round(self.parents * self.population))
        known = _first(evaluations, self.population, generator)
        num_children = self.population - min(num_parents, self.population - 1)
        num_mutants = round(self.mutants * num_children)
        while evaluations.left > 0:
            parents = sorted(known, key=lambda one: -one.score)[:num_parents]
            children: list[Evaluated] = []
            for number in range(min(num_children, evaluations.left)):
                propose = self._proposal(parents, number < num_mutants, generator)
                born = _child(propose, evaluations, generator)
                if born is None:
                    return evaluations.result()
                children.append(evaluations.of(born))
            known = parents + children
        return evaluations.result()

    def _proposal(
        self, parents: list[Evaluated], mutates: bool, generator: torch.Generator
    ) -> Callable[[], Architecture]:
        def drawn() -> Architecture:
            return parents[int(torch.randint(len(parents), (), generator=generator))].architecture

        if mutates:
            return lambda: mutated(drawn(), self.mutation, generator)
        return lambda: crossed(drawn(), drawn(), generator)


def _first(
    evaluations: Evaluations, population: int, generator: torch.Generator
) -> list[Evaluated]:
    """Score a population of random architectures, as far as the budget goes."""
    members: list[Evaluated] = []
    problem = evaluations.problem
    for _ in range(min(population, evaluations.left)):
        drawn = new(lambda: draw(problem.space, problem.excess, generator), evaluations)
        if drawn is None:
            break
        members.append(evaluations.of(drawn))
    return members


def _child(
    propose: Callable[[], Architecture], evaluations: Evaluations, generator: torch.Generator
) -> Architecture | None:
    """Return a new child; a random architecture where all children were scored before."""
    born = new(propose, evaluations)
    if born is not None:
        return born
    problem = evaluations.problem
    return new(lambda: draw(problem.space, problem.excess, generator), evaluations)
