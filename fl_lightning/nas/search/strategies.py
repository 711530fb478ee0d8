"""Search strategies: random search, evolution, a predictor, Optuna's samplers.

Random search scores random architectures, and is the baseline of all other strategies.
Source: Li & Talwalkar 2019, "Random search and reproducibility for NAS".

Regularized evolution: draw S members of a population of P, and copy the best of them with one choice changed.
The copy replaces the oldest member of the population.
Source: Real et al. 2019, AAAI; on NAS-Bench-201 Dong & Yang 2020 (P = 10, S = 3).

Evolution of Once-for-All: the best quarter of all scored architectures are parents. A new generation is the
parents, mutated parents (each choice redrawn with probability 0.1), and crossovers of two parents.
Source: Cai et al. 2020, ICLR, section 3.3, and its code (`EvolutionFinder`).

Both evolutions differ: children are drawn until one meets the constraints and is new, so that the budget
counts different networks.

Predictor: a random forest, fitted to all scores so far, selects from mutations of good architectures and
random architectures the one with the highest prediction.
Source: White et al. 2021, AAAI (BANANAS), for candidates and predictor; the forest as in Wang et al. 2021,
CVPR (AttentiveNAS). Differs: no uncertainty; random candidates prevent a local optimum.

Optuna: TPE on the score, NSGA-II on the score and one cost. Proposals that miss the constraints, or were scored
before, are reported to the sampler and do not count towards the budget. After 20 of them in a row the sampler
gets a random architecture that meets the constraints.
Sources: Bergstra et al. 2011 (TPE); Deb et al. 2002 (NSGA-II); Akiba et al. 2019 (Optuna, an extra).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.optuna_extra import optuna_for, quiet
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.nas.search.problem import (
    Evaluated,
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


# a search ends after this number of draws in a row without a new architecture
MOST_IN_VAIN = 300


class Strategy:
    """Base of the search strategies; problem, budget and seed determine the result.

    Attributes:
        stream: name of the stream of random numbers.
    """

    stream: ClassVar[str] = "random search"

    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score up to ``budget`` different architectures that meet the constraints.

        Fewer are scored if no more are found, in a small space or under tight constraints.

        Args:
            problem: space, score, costs and constraints.
            budget: largest number of architectures to score, at least 1.
            seed: seed of all draws.

        Raises:
            ConfigurationError: if no architecture meets the constraints.
        """
        done = SearchResult(problem, budget)
        generator = torch_generator(seed, self.stream)
        at_random = partial(draw, problem.space, problem.excess, generator)
        while done.left > 0:
            found = new(lambda: self.propose(done, generator) or at_random(), done)
            found = found or new(at_random, done)  # all proposals were scored before
            if found is None:
                break
            done.of(found)
        return done

    def propose(self, done: SearchResult, generator: torch.Generator) -> Architecture | None:
        """Propose the architecture to score next; None (the default) for a random one.

        Args:
            done: problem, and architectures scored so far.
            generator: generator of the draws.
        """
        return None


def new(propose: Callable[[], Architecture | None], done: SearchResult) -> Architecture | None:
    """Return the first proposal that is new and meets the constraints; None after 300 failed proposals.

    Args:
        propose: returns an architecture, or None if the attempt found none.
        done: problem, and architectures scored so far.
    """
    for _ in range(MOST_IN_VAIN):
        proposed = propose()
        if proposed is None or done.knows(proposed):
            continue
        if done.problem.is_met(proposed):
            return proposed
    return None


@final
@dataclass(frozen=True)
class RandomSearch(Strategy):
    """Random search: scores different random architectures, uniform unless constraints are tight.

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
    """Regularized evolution: mutates the best of a random sample of the latest architectures.

    Attributes:
        population: number P of the latest architectures that may be parents, at least 2.
        tournament: number S of possible parents that are drawn, from 1 to P; the best of them is the parent.
    """

    stream: ClassVar[str] = "regularized evolution"

    population: int = 10
    tournament: int = 3

    def __post_init__(self) -> None:
        check_range("population", self.population, "at least 2")
        check_range("tournament", self.tournament, f"from 1 to {self.population}")

    @override
    def propose(self, done: SearchResult, generator: torch.Generator) -> Architecture | None:
        scored = done.evaluated
        if len(scored) < self.population:
            return None
        alive = scored[-self.population :]
        drawn = torch.randperm(len(alive), generator=generator)[: self.tournament]
        parent = max((alive[i] for i in drawn.tolist()), key=lambda one: one.score)
        return with_one_change(parent.architecture, generator)


@final
@dataclass(frozen=True)
class Evolution(Strategy):
    """Evolution as in Once-for-All: mutates and crosses the best architectures so far.

    Attributes:
        population: size of a generation, at least 4.
        parents: number of parents as a share of the population, in (0, 1].
        mutants: share of the children that are mutated, in [0, 1]; the others are crossovers.
        mutation: probability that a choice of a mutated child is redrawn, in (0, 1].

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
        check_range("population", self.population, "at least 4")
        check_range("parents", self.parents, "in (0, 1]")
        check_range("mutants", self.mutants, "in [0, 1]")
        check_range("mutation", self.mutation, "in (0, 1]")

    @override
    def propose(self, done: SearchResult, generator: torch.Generator) -> Architecture | None:
        scored = done.evaluated
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


@final
@dataclass(frozen=True)
class PredictorSearch(Strategy):
    """Search with a predictor: scores the architecture to which a random forest gives the highest prediction.

    Attributes:
        first: number of random architectures before the first prediction, at least 2.
        parents: number of best architectures that are mutated, at least 1.
        candidates: number of candidates per prediction, half of them mutations, at least 2.
    """

    stream: ClassVar[str] = "predictor"

    first: int = 20
    parents: int = 10
    candidates: int = 100

    def __post_init__(self) -> None:
        for name, least in {"first": 2, "parents": 1, "candidates": 2}.items():
            check_range(name, getattr(self, name), f"at least {least}")

    @override
    def propose(self, done: SearchResult, generator: torch.Generator) -> Architecture | None:
        scored = done.evaluated
        if len(scored) < self.first:
            return None
        problem = done.problem
        best = sorted(scored, key=lambda one: -one.score)[: self.parents]
        drawn = [
            draw(problem.space, problem.excess, generator) for _ in range(self.candidates // 2)
        ]
        for number in range(self.candidates - len(drawn)):
            parent = best[number % len(best)].architecture
            drawn.append(with_one_change(parent, generator))
        fresh = [
            one
            for one in dict.fromkeys(drawn)
            if one is not None and not done.knows(one) and problem.is_met(one)
        ]
        if not fresh:
            return None
        predicted = _forest(scored, generator).predict(_features(fresh))
        return fresh[int(predicted.argmax())]


def _forest(scored: Sequence[Evaluated], generator: torch.Generator) -> Any:
    """Fit a random forest that predicts scores; a score of -∞ counts as the lowest finite score."""
    from sklearn.ensemble import RandomForestRegressor  # slow to import, and few need it

    scores = np.array([one.score for one in scored])
    finite = scores[np.isfinite(scores)]
    lowest = finite.min() if len(finite) else 0.0
    seed = int(torch.randint(2**31, (), generator=generator))
    forest = RandomForestRegressor(30, max_depth=15, random_state=seed)
    return forest.fit(_features([one.architecture for one in scored]), np.maximum(scores, lowest))


def _features(architectures: Sequence[Architecture]) -> npt.NDArray[np.int64]:
    """Encode architectures as rows of integers: sizes as indices (-1 if without effect), operations one-hot."""
    space = architectures[0].space
    choices = np.array([one.choices for one in architectures])
    if isinstance(space, SizeSpace):
        active = np.array([space.active(one.choices) for one in architectures])
        return np.where(active, choices, -1)
    counts = [len(decision.options) for decision in space.decisions]
    columns = [choices[:, [row]] == np.arange(count) for row, count in enumerate(counts)]
    return np.concatenate(columns, 1).astype(np.int64)


_PROPOSALS_IN_VAIN = 20
_WORST = -1e300  # score of an unusable architecture: samplers take no infinite number


@final
@dataclass(frozen=True)
class OptunaSearch(Strategy):
    """Search by an Optuna sampler: TPE, or NSGA-II for score and cost.

    Attributes:
        sampler: ``"tpe"`` maximises the score; ``"nsga2"`` also minimises one cost.
        measure: name of the cost that NSGA-II minimises.

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
        done = SearchResult(problem, budget)
        generator = torch_generator(seed, "optuna")
        with quiet(_optuna()):
            directions = ["maximize", "minimize"] if self.sampler == "nsga2" else ["maximize"]
            sampler = self._sampler(derive_seed(seed, "optuna sampler") % 2**32)
            study = _optuna().create_study(sampler=sampler, directions=directions)
            in_vain = 0
            while done.left > 0 and in_vain < MOST_IN_VAIN:
                if in_vain and in_vain % _PROPOSALS_IN_VAIN == 0:
                    _enqueue(study, draw(problem.space, problem.excess, generator))
                before = done.left
                self._try(study, done)
                in_vain = in_vain + 1 if done.left == before else 0
        return done

    def _sampler(self, seed: int) -> BaseSampler:
        samplers = _optuna().samplers
        if self.sampler == "tpe":
            return samplers.TPESampler(seed=seed)  # type: ignore[no-any-return]
        return samplers.NSGAIISampler(seed=seed, population_size=20)  # type: ignore[no-any-return]

    def _try(self, study: Study, done: SearchResult) -> None:
        """Score the sampler's next proposal if it meets the constraints, and tell the sampler the result."""
        problem = done.problem
        trial = study.ask()
        proposed = problem.space.architecture(_choices_of(problem.space, trial))
        excess = problem.excess(proposed)
        trial.set_constraint("excess", excess)
        score = done.of(proposed).score if excess == 0 else _WORST
        values = [max(score, _WORST)]
        if self.sampler == "nsga2":
            values.append(problem.costs(proposed)[self.measure])
        study.tell(trial, values)


def _names(space: SearchSpace) -> list[str]:
    return [f"{number} {decision.name}" for number, decision in enumerate(space.decisions)]


def _choices_of(space: SearchSpace, trial: Trial) -> list[int]:
    """Return the choices an Optuna trial suggests: sizes as ordered integers, operations as categories."""
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
