"""The study: where trials are kept, and Optuna's samplers and pruners, with our seeds.

It is a file, or a database that many machines share. A sampler's own generator would begin anew in every
process, and propose the same again after a resume or on a second machine. Here every trial's draws are a
function of (seed, number of the trial), and of the trials that it learns from: with one worker a resumed
search is the one never interrupted.
Sources: Bergstra et al. 2011 (TPE); Li et al. 2018 (Hyperband); Akiba et al. 2019 (Optuna).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna import Study, pruners, samplers
from optuna.distributions import BaseDistribution
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.sweep_plan import Plan

_SECONDS_TO_WAIT = 60  # for SQLite's lock, which others hold for moments
_IDENTITY = "what is compared"
_MOST_SHOWN = 4


def open_study(search: Search, plan: Plan, storage: str | None, name: str) -> optuna.Study:
    """Return the study of a search, a new one or that of earlier trials.

    Args:
        search: what is searched.
        plan: its configuration.
        storage: a database's URL, or the path of a journal, a file for many machines; a SQLite file in
            the folder of the search if None.
        name: of the study in there.

    Raises:
        ConfigurationError: if the storage cannot be opened, or the study there is of another search.
    """
    study = optuna.create_study(
        storage=_storage(storage, plan.out),
        study_name=name,
        load_if_exists=True,
        direction="maximize" if search.mode == "max" else "minimize",
        sampler=sampler_of(search),
        pruner=pruner_of(search, plan.num_rounds),
    )
    _check_identity(study, _identity(search, plan), storage or str(plan.out))
    first = plan.as_configured
    if search.first_as_configured and search.sampler != "grid" and first and not study.trials:
        study.enqueue_trial(first, skip_if_exists=True)
    return study


def _storage(given: str | None, out: Path) -> BaseStorage:
    out.mkdir(parents=True, exist_ok=True)
    if given is not None and "://" not in given:
        path = Path(given)
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    url = given or f"sqlite:///{(out / 'study.db').absolute()}"
    options = {"connect_args": {"timeout": _SECONDS_TO_WAIT}} if url.startswith("sqlite") else {}
    try:
        return RDBStorage(url, engine_kwargs=options)
    except Exception as error:
        of_sqlalchemy = type(error).__module__.startswith("sqlalchemy")
        if not (of_sqlalchemy or isinstance(error, ImportError | OptunaError)):
            raise
        said = str(error).splitlines()[0]
        raise ConfigurationError(
            f"storage: {_without_password(url)} could not be opened: {said}"
        ) from None


def _without_password(url: str) -> str:
    """Return a URL to show.

    Example:
        >>> _without_password("postgresql://me:secret@host/study")
        'postgresql://me:***@host/study'
    """
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if not at or ":" not in user:
        return url
    return f"{scheme}://{user.partition(':')[0]}:***@{host}"


def _identity(search: Search, plan: Plan) -> dict[str, Any]:
    own = {
        "metric": search.metric,
        "mode": search.mode,
        "value": search.value,
        "seeds": list(plan.seeds),
        "space": {path: repr(parameter) for path, parameter in plan.parameters.items()},
        "configuration": plan.identity(),
    }
    known: dict[str, Any] = json.loads(json.dumps(own, default=str))
    return known


def _check_identity(study: optuna.Study, now: Mapping[str, Any], where: str) -> None:
    then = study.user_attrs.get(_IDENTITY)
    if then is None:
        study.set_user_attr(_IDENTITY, now)
        return
    found = [
        f"{name} ({old.get(key, 'nothing')} there, {new.get(key, 'nothing')} here)"
        for old, new, prefix in (
            (then, now, ""),
            (then["space"], now["space"], "space."),
            (then["configuration"], now["configuration"], ""),
        )
        for key in sorted(old.keys() | new.keys())
        for name in [f"{prefix}{key}"]
        if key not in ("space", "configuration") and old.get(key) != new.get(key)
    ]
    if found:
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise ConfigurationError(
            f"the study {study.study_name!r} in {_without_password(where)} is of another search, "
            f"whose trials would not be comparable: {'; '.join(found[:_MOST_SHOWN])}{more}. Give "
            "another --out or --name, or the search of that study"
        )


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
