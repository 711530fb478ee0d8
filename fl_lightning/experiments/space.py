"""Search spaces, with a range or a list of values for each option; and the keys of a search's YAML.

model.optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}
federation.local_epochs: {low: 1, high: 8}
federation.aggregator: {choices: {mean: {class_path: ...}, median: {class_path: ...}}}
data.batch_size: [8, 16, 32]
"""

# mypy: disable-error-code="type-arg"
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jsonargparse.typing import NonNegativeInt, Path_fr, PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.experiment import Difference, read_seeds

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


_KEYS = ("low", "high", "log", "step", "points")
_MOST_GRID = 10_000  # numbers of one range: more is a mistake


@dataclass(frozen=True)
class Parameter:
    """The values that a search may give to an option: a range or choices, with Optuna's distribution.

    Attributes:
        distribution: Optuna's distribution, over the numbers of a range or the names of choices.
        choices: name to value; numbers, texts, true, false and null are their own names. None for a range.
        points: number of values that a grid takes from a range, both ends included; None for every step.
    """

    distribution: BaseDistribution
    choices: Mapping[Any, Any] | None = None
    points: int | None = None

    @property
    def ends(self) -> list[Any]:
        """Values of the option that are checked before the search: both ends of a range, or all choices."""
        own: Any = self.distribution
        if self.choices is not None:
            return [*self.choices.values()]
        return [*dict.fromkeys((own.low, own.high))]

    def grid(self, path: str) -> list[Any]:
        """Return the values of this option that a grid search tries; for choices, their names.

        Raises:
            ConfigurationError: if there are more than 10,000 values, or the range has neither step nor points.

        Example:
            >>> found = read_parameters({"x": {"low": 0.01, "high": 1, "log": True, "points": 3}})
            >>> found["x"].grid("x"), read_parameters({"y": {"low": 1, "high": 7, "step": 2}})["y"].grid("y")
            ([0.01, 0.1, 1.0], [1, 3, 5, 7])
        """
        if self.choices is not None:
            return list(self.choices)
        own: Any = self.distribution
        if self.points is not None:
            return _spaced(own, self.points)
        if own.log or own.step is None:  # for integers, Optuna's step is at least 1
            raise ConfigurationError(
                f"space: {path}: the sampler grid needs the numbers of the range: give points (how many), step, "
                "or a list of values"
            )
        count = math.floor((own.high - own.low) / own.step + 1e-9) + 1
        if count > _MOST_GRID:
            raise ConfigurationError(
                f"space: {path}: the grid has {count} numbers, too many (at most {_MOST_GRID}): give points, or a "
                "larger step"
            )
        return [own.low + number * own.step for number in range(count)]

    def key_of(self, value: Any) -> Any:
        """Return the name under which Optuna stores an option's value; None if the value is outside the search space."""
        if self.choices is not None:
            return next((key for key, one in self.choices.items() if one == value), None)
        own: Any = self.distribution
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        kind = type(own.low)
        return kind(value) if own.low <= value <= own.high and kind(value) == value else None

    def value_of(self, key: Any) -> Any:
        """Return the option's value that Optuna stores under a name."""
        return key if self.choices is None else self.choices[key]


def _spaced(numbers: Any, count: int) -> list[Any]:
    """Return ``count`` evenly spaced numbers of a range, ends included; with equal ratios on a log scale."""
    low, high = numbers.low, numbers.high
    if count == 1 or low == high:
        return [low]
    space = np.geomspace if numbers.log else np.linspace
    # 0.1 rather than 0.10000000000000002; the ends are as they were given
    inside = [float(f"{one:.12g}") for one in space(low, high, count)[1:-1]]
    found = [low, *inside, high]
    return list(dict.fromkeys(map(round, found) if isinstance(low, int) else found))


def read_parameters(space: Mapping[str, Any]) -> dict[str, Parameter]:
    """Convert the search space of a YAML file to ranges and choices, by path of the searched option.

    Args:
        space: path to a list of values, or to a mapping with `low` and `high`, or with `choices`.

    Raises:
        ConfigurationError: naming every error in the space.

    Example:
        >>> read_parameters({"model.lr": {"low": "1e-3", "high": 1, "log": True}})["model.lr"].distribution
        FloatDistribution(high=1.0, log=True, low=0.001, step=None)
        >>> read_parameters({"data.batch_size": [8, 16]})["data.batch_size"].choices
        {8: 8, 16: 16}
    """
    found: dict[str, Parameter] = {}
    issues = []
    for path, given in space.items():
        try:
            found[str(path)] = _parameter(given)
        except ConfigurationError as error:
            issues.append(f"space: {path} {error}")
    inner = [(a, b) for a in found for b in found if b.startswith(f"{a}.")]
    issues += [f"space: {b} is inside {a}: search one of them" for a, b in inner]
    if not space:
        issues.append(
            "space must name at least one option of the configuration, e.g. model.optimizer.lr: {low: 1e-4, "
            "high: 1e-1, log: true}"
        )
    if issues:
        raise ConfigurationError("\n".join(issues))
    return found


def _parameter(given: Any) -> Parameter:
    if isinstance(given, list):
        return _choices(_named(given))
    if not isinstance(given, dict) or ("choices" in given) == ("low" in given or "high" in given):
        raise ConfigurationError(
            f"must be a list of values, or a mapping with low and high, or with choices, got {given!r}"
        )
    if "choices" in given:
        _only(given, ("choices",))
        choices = given["choices"]
        if isinstance(choices, dict) and choices:
            return _choices({str(name): value for name, value in choices.items()})
        return _choices(_named(choices))
    return _range(given)


def _choices(values: dict[Any, Any]) -> Parameter:
    from optuna.distributions import CategoricalDistribution

    return Parameter(CategoricalDistribution(list(values)), values)


def _range(given: Mapping[str, Any]) -> Parameter:
    from optuna.distributions import FloatDistribution, IntDistribution

    _only(given, _KEYS)
    low, high, step = (_number(given.get(key), key) for key in ("low", "high", "step"))
    log, points = given.get("log", False), given.get("points")
    if low is None or high is None:
        raise ConfigurationError(f"must have both low and high, got {dict(given)}")
    if not isinstance(log, bool):
        raise ConfigurationError(f"has log, which must be true or false, got {log!r}")
    if points is not None and (type(points) is not int or points < 1):
        raise ConfigurationError(
            f"has points, which must be a whole number above 0, got {points!r}"
        )
    is_whole = all(isinstance(one, int) for one in (low, high, step or 1))
    kind: Any = IntDistribution if is_whole else FloatDistribution
    try:
        distribution = kind(low, high, log, 1 if step is None and is_whole else step)
    except ValueError as error:
        raise ConfigurationError(f"must be a valid range: {error}") from None
    return Parameter(distribution, points=points)


def _number(given: Any, key: str) -> float | int | None:
    if given is None:
        return None
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        raise ConfigurationError(f"has {key}, which must be a number, got {given!r}") from None
    if not math.isfinite(value):
        raise ConfigurationError(f"has {key}, which must be a finite number, got {given!r}")
    return given if isinstance(given, int) else value


def _named(values: Any) -> dict[Any, Any]:
    """Name the choices of an option: a class by its class name, a number or text by itself."""
    if not isinstance(values, list) or not values:
        raise ConfigurationError(f"must have at least one value to choose from, got {values!r}")
    names = [_name(value) for value in values]
    if len({(type(name), name) for name in names}) < len(names):
        raise ConfigurationError(
            "has several choices of the same name: give them names, as choices: {name: value}"
        )
    return dict(zip(names, values, strict=True))


def _name(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and "class_path" in value:
        return str(value["class_path"]).rpartition(".")[2]
    return str(value)


def _only(given: Mapping[str, Any], allowed: Sequence[str]) -> None:
    if unknown := [str(key) for key in given if key not in allowed]:
        raise ConfigurationError(
            f"has {', '.join(unknown)}, which is not accepted: the keys are {', '.join(allowed)}"
        )


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options of a search for hyperparameters: what is searched, how, and by which metric.

    Args:
        space: what to search: path of an option to a range {low, high, log, step, points}, to a list of
            values, or to {choices: {name: value}}. The keys init_args in a path may be left out.
        configs: files of the configuration, layered; paths are relative to the search's own file.
            Files of --config follow.
        base: a difference to the configuration, in the search's file, e.g. fewer rounds.
        metric: metric to optimise, as the runs log it.
        mode: whether a high (max) or a low (min) value of the metric is good.
        value: value of a trial: the metric after its last round, or in its best round.
        seeds: seeds of the runs of each trial, whose values are averaged: [0, 1, 2] or 0,1,2. The
            configuration's own seed if null.
        trials: number of trials, over all machines. If null, the size of the grid, or 20 for other
            samplers.
        sampler: how values are proposed: tpe (learns from earlier trials), random, or grid.
        startup_trials: random trials before tpe learns, and complete ones before median prunes.
        pruner: how trials are stopped early: none; median, if worse than half of the earlier trials
            in the same round; or hyperband, which continues the best third at growing intervals.
        min_rounds: rounds before a trial may be stopped.
        first_as_configured: whether the first trial has the configuration's own values.
        sampler_seed: seed of the proposed values.

    Raises:
        ConfigurationError: if the space is empty or invalid.

    Example:
        >>> search = Search(space={"model.lr": {"low": 0.001, "high": 1.0, "log": True}}, trials=10)
        >>> list(search.parameters), search.num_trials
        (['model.lr'], 10)
    """

    space: dict = field(default_factory=dict)
    configs: list[Path_fr] = field(default_factory=list)
    base: Difference | None = None
    metric: str = "val/accuracy"
    mode: Literal["max", "min"] = "max"
    value: Literal["last", "best"] = "last"
    seeds: list[int] | int | str | None = None
    trials: PositiveInt | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    startup_trials: NonNegativeInt = 5
    pruner: Literal["none", "median", "hyperband"] = "median"
    min_rounds: PositiveInt = 3
    first_as_configured: bool = True
    sampler_seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        parameters = self.parameters
        if self.sampler == "grid":
            for path, parameter in parameters.items():
                parameter.grid(path)
        if self.seeds is not None:
            read_seeds(self.seeds)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Ranges and choices of the searched options, by path of the option."""
        return read_parameters(self.space)

    @property
    def num_trials(self) -> int:
        """Number of trials of the search."""
        if self.sampler != "grid":
            return self.trials or 20
        size = math.prod(len(one.grid(path)) for path, one in self.parameters.items())
        return min(size, self.trials or size)
