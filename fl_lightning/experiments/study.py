"""Optuna's study of a search: storage, samplers, pruners, and the results of trials.

The study is a file, or a database that many machines share. Each trial's values are a function of (seed, number
of the trial) and of the earlier trials: with one worker, a resumed search equals one that was never interrupted.
(A sampler's own generator would propose the same values again after a resume, or on a second machine.)
Sources: Bergstra et al. 2011 (TPE); Li et al. 2018 (Hyperband); Akiba et al. 2019 (Optuna).

Importance of an option: share of the variance of values over the space that this option alone explains, by a
random forest fitted to the trials (fANOVA), normalised to a sum of 1. A stopped trial gets the value of the worst
complete trial, or its own if it is worse.
Source: Hutter et al. 2014, ICML; Optuna's implementation.
Differs: Optuna leaves out stopped trials, in which the most important option often has bad values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna import Study, pruners, samplers
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.experiments.experiment import as_text
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.sweep_plan import Plan, with_values
from fl_lightning.federation import differences
from fl_lightning.reports.charts import Panel, draw, write_figure
from fl_lightning.reports.panels import bars, points

if TYPE_CHECKING:
    from pandas import DataFrame


_SECONDS_TO_WAIT = 60  # for SQLite's lock, which other processes hold for moments
_IDENTITY = "what is compared"  # attribute of the study with the options that all its trials share
_MOST_SHOWN = 4


def open_study(search: Search, plan: Plan, storage: str | None, name: str) -> optuna.Study:
    """Create the Optuna study of a search, or open it if it exists.

    Args:
        search: options of the search.
        plan: plan of the search.
        storage: URL of a database or path of a journal file; a SQLite file in the search's folder if None.
        name: name of the study in the storage.

    Raises:
        ConfigurationError: if the storage cannot be opened, or its study belongs to another search.
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


def _without_password(where: str) -> str:
    """Replace the password in a database's URL by stars; a path is returned unchanged.

    Example:
        >>> _without_password("postgresql://me:secret@host/study")
        'postgresql://me:***@host/study'
        >>> _without_password("no-driver://me:sec@ret@host:port/study")
        'no-driver://me:***@host:port/study'
    """
    scheme, _, rest = where.partition("://")
    user, at, host = rest.rpartition("@")
    if not at or ":" not in user:
        return where
    return f"{scheme}://{user.partition(':')[0]}:***@{host}"


def _identity(search: Search, plan: Plan) -> dict[str, Any]:
    """Return what all trials of a study must share: the configuration, except values of searched options."""
    searched = dict.fromkeys(plan.places.values(), "<searched>")
    own = with_values(plan.configuration, searched) | {
        "metric": search.metric,
        "mode": search.mode,
        "value": search.value,
        "seeds": list(plan.seeds),
        "rounds": plan.num_rounds,
        "space": {path: repr(parameter) for path, parameter in plan.parameters.items()},
    }
    own["trainer"] = {**own["trainer"], "logger": None}
    known: dict[str, Any] = json.loads(json.dumps(own, default=str))
    return known


def _check_identity(study: optuna.Study, now: Mapping[str, Any], where: str) -> None:
    then = study.user_attrs.get(_IDENTITY)
    if then is None:
        study.set_user_attr(_IDENTITY, now)
        return
    found = differences(then, now, then | now)
    if found:
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise ConfigurationError(
            f"the study {study.study_name!r} in {_without_password(where)} belongs to another search, "
            f"whose trials are not comparable: {'; '.join(found[:_MOST_SHOWN])}{more}. Give another --out or "
            "--name for a new study, or the search of this study"
        )


class _Grid(samplers.GridSampler):
    """Optuna's grid sampler, changed not to end the study, because `Trials` counts the trials."""

    @override
    def after_trial(self, *args: Any) -> None:
        pass


def sampler_of(search: Search, number: int) -> samplers.BaseSampler:
    """Return the Optuna sampler that proposes a trial's values, given the trial's number."""
    if search.sampler == "grid":
        grid = {path: parameter.grid(path) for path, parameter in search.parameters.items()}
        shuffle = derive_seed(search.sampler_seed, "sweep grid") % 2**32  # the same for all trials
        return _Grid(grid, seed=shuffle)
    seed = derive_seed(search.sampler_seed, "sweep", number) % 2**32
    if search.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    return samplers.TPESampler(n_startup_trials=search.startup_trials, seed=seed)


def ask(study: Study, search: Search) -> optuna.Trial:
    """Create the next trial of a study, and let its sampler propose values for the searched options."""
    trial = study.ask()
    study.sampler = sampler_of(search, trial.number)
    for path, parameter in search.parameters.items():
        trial._suggest(path, parameter.distribution)
    return trial


def pruner_of(search: Search, num_rounds: int) -> pruners.BasePruner:
    """Return the Optuna pruner of a search; a complete trial has ``num_rounds`` rounds."""
    if search.pruner == "median":
        return pruners.MedianPruner(
            n_startup_trials=search.startup_trials, n_warmup_steps=search.min_rounds
        )
    if search.pruner == "hyperband":
        return pruners.HyperbandPruner(
            min_resource=min(search.min_rounds, num_rounds), max_resource=num_rounds
        )
    return pruners.NopPruner()


_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}
_FEWEST = 6  # trials that are needed for an estimate of importance


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Return the ended trials: first the complete trials, best first, then stopped trials, longest first, then failed trials."""
    sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1

    def order(trial: FrozenTrial) -> tuple[float, ...]:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            return (0, sign * trial.value, trial.number)
        place = 1 if trial.state == TrialState.PRUNED else 2
        return (place, -int(trial.user_attrs.get("rounds", 0)), trial.number)

    trials = study.get_trials(deepcopy=False)
    return sorted((one for one in trials if one.state.is_finished()), key=order)


def trials_table(study: optuna.Study, options: Sequence[str]) -> DataFrame:
    """Return a table with one row per ended trial, best trials first, with unrounded numbers."""
    import pandas

    facts = ("rounds", "seconds", "reason")
    rows = [
        (
            one.number,
            _STATES[one.state],
            one.value if one.state == TrialState.COMPLETE else None,
            *(one.user_attrs.get(name) for name in facts),
            *(one.params.get(option) for option in options),
            " ".join(map(str, one.user_attrs.get("values", []))),
        )
        for one in ranked(study)
    ]
    names = ["trial", "state", "value", *facts, *options, "values of seeds"]
    return pandas.DataFrame(rows, columns=names, dtype=object)


def cells(
    table: DataFrame, metric: str, names: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of trials as texts; ``names`` are short names of the searched options."""
    rows = [
        [
            str(row["trial"]),
            row["state"] if row["value"] is None else f"{row['value']:.4f}",
            "-" if row["rounds"] is None else str(row["rounds"]),
            f"{row['seconds'] or 0:.0f}",
            *(shown(row[path]) for path in names),
        ]
        for row in table.to_dict("records")
    ]
    return ["trial", metric, "rounds", "seconds", *names.values()], rows


def write_best(path: Path, best: FrozenTrial, plan: Plan, metric: str) -> None:
    """Write the complete configuration of the best trial as a YAML file."""
    lines = [f"# {metric} {best.value:.6g}: trial {best.number} of a search over"]
    lines += [f"#   {option}: {best.params[option]}" for option in plan.parameters]
    lines += [f"# fl-lightning fit --config {path}", ""]
    path.write_text("\n".join(lines) + as_text(plan.with_keys(best.params)))


def shown_values(params: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Format the values that a trial gives to the searched options, under short names of the options.

    Example:
        >>> shown_values({"model.optimizer.lr": 0.00312345}, {"model.optimizer.lr": "lr"})
        'lr 0.003123'
    """
    return ", ".join(f"{names[path]} {shown(value)}" for path, value in params.items())


def shown(value: Any) -> str:
    """Format the value of an option as text; real numbers get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def importances(study: optuna.Study) -> dict[str, float]:
    """Return each searched option's importance for the metric, highest first; empty if there are too few trials."""
    values = {state: [v for _, v in _points(study, state)] for state in _SHOWN}
    if sum(map(len, values.values())) < _FEWEST or len(set(values[TrialState.COMPLETE])) < 2:
        return {}
    worst = min if study.direction == StudyDirection.MAXIMIZE else max
    known = optuna.create_study(direction=study.direction)
    for one in study.get_trials(states=[*_SHOWN]):
        if one.state == TrialState.PRUNED:
            worse = [*values[TrialState.COMPLETE], *([] if one.value is None else [one.value])]
            one.state, one.value = TrialState.COMPLETE, worst(worse)
        known.add_trial(one)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        found = optuna.importance.get_param_importances(known, evaluator=evaluator)
    except (RuntimeError, ValueError):  # e.g. an option that had one value only
        return {}
    return {option: float(share) for option, share in found.items()}


def draw_importance(path: Path, shares: Mapping[str, float], names: Mapping[str, str]) -> None:
    """Draw the importance of each searched option as a bar, into PNG and SVG files."""
    panel = bars([names[option] for option in shares], [*shares.values()])
    write_figure(draw({"importance, share of all": panel})[0], path)


def draw_trials(out: Path, study: optuna.Study, metric: str) -> None:
    """Draw the metric of complete trials: by trial into the file ``trials``, by option's value into ``options``."""
    done = _points(study, TrialState.COMPLETE)
    values = [value for _, value in done]
    texts = [f"trial {trial.number}: {value:.4g}" for trial, value in done]
    sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
    best: list[tuple[float, float]] = []
    for trial, value in done:
        if not best or sign * value < sign * best[-1][1]:
            best.append((trial.number, value))
    over_time = points(
        [trial.number for trial, _ in done],
        values,
        texts,
        labels=("trial", metric),
        steps=("best so far", best),
    )
    write_figure(draw({"": over_time})[0], out / "trials")
    distributions = {name: d for trial, _ in done for name, d in trial.distributions.items()}
    panels: dict[str, Panel] = {}
    for option, distribution in sorted(distributions.items()):
        known = [number for number, (trial, _) in enumerate(done) if option in trial.params]
        panels[option] = points(
            [done[number][0].params[option] for number in known],
            [values[number] for number in known],
            [texts[number] for number in known],
            labels=("", metric),
            scale="log" if getattr(distribution, "log", False) else "linear",
        )
    if panels:
        write_figure(draw(panels)[0], out / "options")


_SHOWN = (TrialState.COMPLETE, TrialState.PRUNED)


def _points(study: optuna.Study, state: TrialState) -> list[tuple[FrozenTrial, float]]:
    """Return the trials of a given state with their values; a stopped trial's value is that of its last round."""
    trials = study.get_trials(deepcopy=False, states=(state,))
    return [(one, one.value) for one in trials if one.value is not None]


def trial_line(
    trial: FrozenTrial, done: int, budget: int, reason: str | None, *, is_best: bool
) -> str:
    """Return the line to print when a trial has ended; ``reason`` is None, or says why the trial was stopped."""
    seconds = f"{float(trial.user_attrs.get('seconds', 0)):.0f} s"
    value = f"{trial.value:.4f}" if reason is None and trial.value is not None else reason
    mark = ", best so far" if is_best else ""
    return f"[{done}/{budget}] trial {trial.number}: {value}{mark}, {seconds}"
