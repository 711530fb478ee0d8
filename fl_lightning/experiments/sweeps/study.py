"""The study: where trials are kept, in a file or a database that many machines share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.sweeps.plan import Plan
from fl_lightning.experiments.sweeps.samplers import pruner_of, sampler_of
from fl_lightning.experiments.sweeps.search import Search

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
