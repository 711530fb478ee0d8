"""Optuna's samplers, which propose values, and pruners, which stop trials, with our seeds.

A sampler's own generator would begin anew in every process, and propose the same again after a
resume or on a second machine. Here every trial's draws are a function of (seed, number of the trial),
and of the trials that it learns from: with one worker a resumed search is the one never interrupted.
Sources: Bergstra et al. 2011 (TPE); Li et al. 2018 (Hyperband); Akiba et al. 2019 (Optuna).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optuna import Study, pruners, samplers
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial
from typing_extensions import override

from fl_lightning.core.seeds import derive_seed
from fl_lightning.experiments.sweeps.search import Search


def sampler_of(search: Search) -> samplers.BaseSampler:
    """Return what proposes values."""
    return SeededByTrial(_maker(search), search.sampler_seed)


def pruner_of(search: Search, num_rounds: int) -> pruners.BasePruner:
    """Return what stops trials.

    Args:
        search: says which.
        num_rounds: of a whole trial.
    """
    if search.pruner == "median":
        return pruners.MedianPruner(
            n_startup_trials=search.startup_trials, n_warmup_steps=search.min_rounds
        )
    if search.pruner == "hyperband":
        return pruners.HyperbandPruner(
            min_resource=min(search.min_rounds, num_rounds), max_resource=num_rounds
        )
    return pruners.NopPruner()


class SeededByTrial(samplers.BaseSampler):
    """A sampler that is made anew for every trial, with a seed of that trial's number.

    Args:
        make: makes one from its seed.
        seed: the root.
    """

    def __init__(self, make: Callable[[int], samplers.BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._made: dict[int, samplers.BaseSampler] = {}

    @override
    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._of(trial).before_trial(study, trial)

    @override
    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    @override
    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    @override
    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def _of(self, trial: FrozenTrial) -> samplers.BaseSampler:
        if trial.number not in self._made:
            seed = derive_seed(self._seed, "sweep", trial.number) % 2**32
            self._made = {trial.number: self._make(seed)}  # proposals are made one after the other
        return self._made[trial.number]


def _maker(search: Search) -> Callable[[int], samplers.BaseSampler]:
    if search.sampler == "grid":
        grid: Mapping[str, Any] = {
            path: parameter.grid(path) for path, parameter in search.parameters.items()
        }
        shuffled = derive_seed(search.sampler_seed, "sweep grid") % 2**32  # by all in the same way
        return lambda _: samplers.GridSampler(grid, seed=shuffled)
    if search.sampler == "random":
        return lambda seed: samplers.RandomSampler(seed=seed)
    return lambda seed: samplers.TPESampler(n_startup_trials=search.startup_trials, seed=seed)
