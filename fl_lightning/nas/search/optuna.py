"""Optuna's samplers as searches: TPE on the score, NSGA-II on score and one cost.

A proposal that misses the constraints, or was scored before, is told to the sampler and costs nothing
of the budget. After 20 of them in a row the sampler is given a random architecture that meets the
constraints.
Sources: Bergstra et al. 2011 (TPE); Deb et al. 2002 (NSGA-II); Akiba et al. 2019 (Optuna, an extra).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.optuna_extra import optuna_for, quiet
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.nas.search.feasible import draw
from fl_lightning.nas.search.problem import Evaluations, Problem, SearchResult
from fl_lightning.nas.search.strategy import MOST_IN_VAIN, Strategy
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

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

    def search(self, problem: Problem, budget: int, seed: int = 0) -> SearchResult:
        """Score as many architectures as the budget says."""
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
        proposed = problem.space.architecture(_choices(problem.space, trial))
        excess = problem.excess(proposed)
        trial.set_constraint("excess", excess)
        score = evaluations.of(proposed).score if excess == 0 else _WORST
        values = [max(score, _WORST)]
        if self.sampler == "nsga2":
            values.append(problem.costs(proposed)[self.measure])
        study.tell(trial, values)


def _names(space: SearchSpace) -> list[str]:
    return [f"{number} {decision.name}" for number, decision in enumerate(space.decisions)]


def _choices(space: SearchSpace, trial: Trial) -> list[int]:
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
