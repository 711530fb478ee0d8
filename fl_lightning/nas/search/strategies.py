"""Search strategies: random, evolution, Optuna's samplers.

Random search draws architectures and keeps the best, which is the baseline of all other searches.
Source: Li & Talwalkar 2019, "Random search and reproducibility for NAS".

Regularized evolution: of S members drawn from P, the best has a child with one choice changed; the
child enters the population, the oldest member leaves it.
Source: Real et al. 2019, AAAI; on NAS-Bench-201 Dong & Yang 2020 (P = 10, S = 3).

Once-for-All's evolution: of a generation, the best quarter are parents; the next generation is the parents,
mutated parents (each choice drawn anew with probability 0.1), and crossed pairs of parents.
Source: Cai et al. 2020, ICLR, section 3.3, and its code (`EvolutionFinder`).

Differs: every child meets the constraints and is new, so that a budget is a number of networks. In Once-for-All's
search children are drawn until they do; the best of all that were scored are the parents.

Optuna: TPE on the score, NSGA-II on score and one cost. A proposal that misses the constraints, or was scored
before, is told to the sampler and costs nothing of the budget. After 20 of them in a row the sampler is given a
random architecture that meets the constraints.
Sources: Bergstra et al. 2011 (TPE); Deb et al. 2002 (NSGA-II); Akiba et al. 2019 (Optuna, an extra).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.optuna_extra import optuna_for, quiet
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.nas.search.problem import (
    Evaluated,
    Evaluations,
    Problem,
    SearchResult,
    crossed,
    draw,
    mutated,
    with_one_change,
)
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial


# draws in a row that bring nothing new before a search ends: it has seen what there is
MOST_IN_VAIN = 300


class Strategy:
    """Base of the searches; the same problem, budget and seed give the same result."""

    stream: ClassVar[str] = "random search"  # of random numbers

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
        evaluations = Evaluations(problem, budget)
        generator = torch_generator(seed, self.stream)
        at_random = partial(draw, problem.space, problem.excess, generator)
        while evaluations.left > 0:
            scored = evaluations.result().evaluated
            proposals = partial(self.propose, scored, generator)
            found = new(lambda: proposals() or at_random(), evaluations)  # noqa: B023
            found = found or new(at_random, evaluations)  # all children were scored before
            if found is None:
                break
            evaluations.of(found)
        return evaluations.result()

    def propose(
        self, scored: Sequence[Evaluated], generator: torch.Generator
    ) -> Architecture | None:
        """Return an architecture to score next, or None for a random one, as always by default.

        Args:
            scored: architectures so far, in their order.
            generator: of the draws.
        """
        return None


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


@final
@dataclass(frozen=True)
class RandomSearch(Strategy):
    """Different architectures, drawn uniformly; under tight constraints see `draw`.

    Example:
        >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
        >>> skips = lambda cell: cell.options.count("skip_connect")
        >>> problem = Problem(NASBench201(), skips, lambda cell: {"skips": skips(cell)})
        >>> len(RandomSearch().search(problem, budget=20, seed=1).evaluated)
        20
    """


@final
@dataclass(frozen=True)
class RegularizedEvolution(Strategy):
    """Regularized evolution.

    Attributes:
        population: P, how many members there are, at least 2.
        tournament: S, of how many the best has a child, in 1 to P.
    """

    stream: ClassVar[str] = "regularized evolution"

    population: int = 10
    tournament: int = 3

    def __post_init__(self) -> None:
        if self.population < 2 or not 1 <= self.tournament <= self.population:
            raise ConfigurationError(
                "regularized evolution needs a population of at least 2 and a tournament of 1 to "
                f"population, got {self.population} and {self.tournament}"
            )

    @override
    def propose(
        self, scored: Sequence[Evaluated], generator: torch.Generator
    ) -> Architecture | None:
        if len(scored) < self.population:
            return None
        alive = scored[-self.population :]
        drawn = torch.randperm(len(alive), generator=generator)[: self.tournament]
        parent = max((alive[i] for i in drawn.tolist()), key=lambda one: one.score)
        return with_one_change(parent.architecture, generator)


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

    stream: ClassVar[str] = "evolution"

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

    @override
    def propose(
        self, scored: Sequence[Evaluated], generator: torch.Generator
    ) -> Architecture | None:
        if len(scored) < self.population:
            return None
        num_parents = max(2, round(self.parents * self.population))
        num_children = self.population - min(num_parents, self.population - 1)
        generation, number = divmod(len(scored) - self.population, num_children)
        before = scored[: self.population + generation * num_children]
        parents = sorted(before, key=lambda one: -one.score)[:num_parents]

        def drawn() -> Architecture:
            return parents[int(torch.randint(len(parents), (), generator=generator))].architecture

        if number < round(self.mutants * num_children):
            return mutated(drawn(), self.mutation, generator)
        return crossed(drawn(), drawn(), generator)


_PROPOSALS_IN_VAIN = 20
_WORST = -1e300  # for a sampler: it takes no infinite number


@final
@dataclass(frozen=True)
class OptunaSearch(Strategy):
    """A search by one of Optuna's samplers.

    Attributes:
        sampler: ``"tpe"`` or ``"nsga2"``.
        measure: the cost that NSGA-II lowers while it raises the score; TPE has the score alone.

    Raises:
        ConfigurationError: if Optuna is not installed.
    """

    sampler: Literal["tpe", "nsga2"] = "tpe"
    measure: str = "flops"

    def __post_init__(self) -> None:
        if self.sampler not in ("tpe", "nsga2"):
            raise ConfigurationError(f"sampler must be tpe or nsga2, got {self.sampler!r}")
        _optuna()

    @override
    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        evaluations = Evaluations(problem, budget)
        generator = torch_generator(seed, "optuna")
        with quiet(_optuna()):
            directions = ["maximize", "minimize"] if self.sampler == "nsga2" else ["maximize"]
            sampler = self._sampler(derive_seed(seed, "optuna sampler") % 2**32)
            study = _optuna().create_study(sampler=sampler, directions=directions)
            in_vain = 0
            while evaluations.left > 0 and in_vain < MOST_IN_VAIN:
                if in_vain and in_vain % _PROPOSALS_IN_VAIN == 0:
                    _enqueue(study, draw(problem.space, problem.excess, generator))
                before = evaluations.left
                self._try(study, evaluations)
                in_vain = in_vain + 1 if evaluations.left == before else 0
        return evaluations.result()

    def _sampler(self, seed: int) -> BaseSampler:
        samplers = _optuna().samplers
        if self.sampler == "tpe":
            return samplers.TPESampler(seed=seed)  # type: ignore[no-any-return]
        return samplers.NSGAIISampler(seed=seed, population_size=20)  # type: ignore[no-any-return]

    def _try(self, study: Study, evaluations: Evaluations) -> None:
        """Ask for an architecture, and tell its score if it meets the constraints."""
        problem = evaluations.problem
        trial = study.ask()
        proposed = problem.space.architecture(_choices_of(problem.space, trial))
        excess = problem.excess(proposed)
        trial.set_constraint("excess", excess)
        score = evaluations.of(proposed).score if excess == 0 else _WORST
        values = [max(score, _WORST)]
        if self.sampler == "nsga2":
            values.append(problem.costs(proposed)[self.measure])
        study.tell(trial, values)


def _names(space: SearchSpace) -> list[str]:
    return [f"{number} {decision.name}" for number, decision in enumerate(space.decisions)]


def _choices_of(space: SearchSpace, trial: Trial) -> list[int]:
    """Ask for every choice: options of sizes have an order, operations have none."""
    choices = []
    for name, decision in zip(_names(space), space.decisions, strict=True):
        last = len(decision.options) - 1
        if isinstance(space, SizeSpace):
            choices.append(trial.suggest_int(name, 0, last))
        else:
            choices.append(trial.suggest_categorical(name, list(range(last + 1))))
    return choices


def _enqueue(study: Study, architecture: Architecture | None) -> None:
    if architecture is not None:
        names = _names(architecture.space)
        study.enqueue_trial(dict(zip(names, architecture.choices, strict=True)))


def _optuna() -> Any:
    return optuna_for("a search by tpe or nsga2", "nas", ", or use evolution")
