"""The study: where trials are kept, and Optuna's samplers and pruners, with our seeds.

It is a file, or a database that many machines share. A sampler's own generator would begin anew in every
process, and propose the same again after a resume or on a second machine. Here every trial's draws are a
function of (seed, number of the trial), and of the trials that it learns from: with one worker a resumed
search is the one never interrupted.
Sources: Bergstra et al. 2011 (TPE); Li et al. 2018 (Hyperband); Akiba et al. 2019 (Optuna).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna import Study, pruners, samplers
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
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
        sampler=sampler_of(search, 0),
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


class _Grid(samplers.GridSampler):
    """A grid without an end of its own: the number of trials ends a search, which is no loop of Optuna's."""

    @override
    def after_trial(self, *args: Any) -> None:
        pass


def sampler_of(search: Search, number: int) -> samplers.BaseSampler:
    """Return what proposes the values of the trial with a number."""
    if search.sampler == "grid":
        grid = {path: parameter.grid(path) for path, parameter in search.parameters.items()}
        order = derive_seed(search.sampler_seed, "sweep grid") % 2**32  # the same for all trials
        return _Grid(grid, seed=order)
    seed = derive_seed(search.sampler_seed, "sweep", number) % 2**32
    if search.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    return samplers.TPESampler(n_startup_trials=search.startup_trials, seed=seed)


def ask(study: Study, search: Search) -> optuna.Trial:
    """Return a new trial with its values, drawn by a sampler of its own."""
    trial = study.ask()
    study.sampler = sampler_of(search, trial.number)
    for path, parameter in search.parameters.items():
        trial._suggest(path, parameter.distribution())
    return trial


def pruner_of(search: Search, num_rounds: int) -> pruners.BasePruner:
    """Return what stops trials, of which a whole one has so many rounds."""
    if search.pruner == "median":
        return pruners.MedianPruner(
            n_startup_trials=search.startup_trials, n_warmup_steps=search.min_rounds
        )
    if search.pruner == "hyperband":
        return pruners.HyperbandPruner(
            min_resource=min(search.min_rounds, num_rounds), max_resource=num_rounds
        )
    return pruners.NopPruner()
