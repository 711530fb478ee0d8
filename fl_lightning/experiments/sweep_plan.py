"""From a search to the runs of its trials: where each option is, and the configuration with a trial's values."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.experiment import (
    PlannedRun,
    Resolve,
    Variant,
    as_text,
    read_seeds,
    resolved,
)
from fl_lightning.experiments.space import Parameter, Search

Place: TypeAlias = tuple[str | int, ...]


def place_of(configuration: Mapping[str, Any], path: str) -> Place:
    """Return the keys that lead to an option; `init_args` need not be written.

    The last of them may be new: the parser knows whether there is such an option.

    Args:
        configuration: complete.
        path: keys with dots between them; of a list the number of an entry, from 0.

    Raises:
        ConfigurationError: if nothing is there that could have such an option.

    Example:
        >>> model = {"class_path": "my.Net", "init_args": {"lr": 0.1}}
        >>> place_of({"model": model}, "model.lr")
        ('model', 'init_args', 'lr')
    """
    keys: list[str | int] = []
    node: Any = configuration
    words = path.split(".")
    for number, word in enumerate(words):
        is_last = number == len(words) - 1
        if isinstance(node, list):
            keys.append(_entry(node, word, words[:number], path))
        elif isinstance(node, Mapping):
            keys += _keys(node, word, is_last, words[:number], path)
        else:
            owner = ".".join(words[:number])
            shown = "null" if node is None else repr(node)
            raise ConfigurationError(
                f"space: {path}: {owner} is {shown} in the configuration and has no {word}: give it "
                "a class there, or under base"
            )
        if not is_last:
            node = value_at(configuration, keys)
    return tuple(keys)


def value_at(configuration: Any, place: Sequence[str | int]) -> Any:
    """Return the value at a place; None if there is none."""
    node = configuration
    for key in place:
        if isinstance(node, Mapping) and key not in node:
            return None
        node = node[key]
    return node


def with_values(configuration: dict[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """Return a configuration with other values at some places.

    Example:
        >>> with_values({"a": {"b": 1, "c": 2}}, {("a", "b"): 3})
        {'a': {'b': 3, 'c': 2}}
    """
    changed = copy.deepcopy(configuration)
    for place, value in values.items():
        node: Any = changed
        for key in place[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
        node[place[-1]] = copy.deepcopy(value)
    return changed


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return for every path its last words, as many as tell it from the others.

    Example:
        >>> short_names(["model.optimizer.lr", "model.scheduler.lr", "data.batch_size"]).values()
        dict_values(['optimizer.lr', 'scheduler.lr', 'batch_size'])
    """
    words = {path: [w for w in path.split(".") if w != "init_args"] for path in paths}
    names = {}
    for path, own in words.items():
        others = [other for name, other in words.items() if name != path]
        count = next(
            (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)),
            len(own),
        )
        names[path] = ".".join(own[-count:])
    return names


def _keys(
    node: Mapping[str, Any], word: str, is_last: bool, before: Sequence[str], path: str
) -> list[str | int]:
    """Keys from a mapping to the option that a word names."""
    if word in node:
        return [word]
    inside = node.get("init_args") or {}
    if "class_path" in node and (word in inside or is_last):
        extra = node.get("dict_kwargs") or {}
        return ["dict_kwargs" if word in extra else "init_args", word]
    if is_last and before:
        return [word]
    known = [str(key) for key in [*node, *inside] if key not in ("class_path", "init_args")]
    close = difflib.get_close_matches(word, known, n=1)
    advice = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
    where = f"{'.'.join(before)} has" if before else "the configuration has"
    raise ConfigurationError(f"space: {path}: {where} no {word!r}. {advice}")


def _entry(node: Sequence[Any], word: str, before: Sequence[str], path: str) -> int:
    if not word.isdecimal() or int(word) >= len(node):
        owner = ".".join(before)
        raise ConfigurationError(
            f"space: {path}: {owner} is a list of {len(node)}: name an entry by its number, from 0, "
            f"got {word!r}"
        )
    return int(word)


@dataclass(frozen=True)
class Plan:
    """The runs that a search may need.

    Attributes:
        configuration: complete, of the trial that changes nothing.
        parameters: what is searched, by path.
        places: where that is in the configuration, by path.
        seeds: of the runs of a trial.
        out: folder of the search.
    """

    configuration: dict[str, Any]
    parameters: Mapping[str, Parameter]
    places: Mapping[str, Place]
    seeds: Sequence[int]
    out: Path

    @property
    def num_rounds(self) -> int:
        """Rounds of a whole trial; -1 if they are not limited by their number."""
        rounds = self.configuration["trainer"]["max_epochs"]
        return -1 if rounds is None else int(rounds)

    @property
    def names(self) -> dict[str, str]:
        """Short names of the searched options, by path."""
        return short_names(list(self.parameters))

    @property
    def as_configured(self) -> dict[str, Any] | None:
        """The configuration's own values as Optuna knows them; None if one is not in the space."""
        keys = {
            path: parameter.key_of(value_at(self.configuration, self.places[path]))
            for path, parameter in self.parameters.items()
        }
        return None if any(key is None for key in keys.values()) else keys

    def with_keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration with values by path, as Optuna knows them."""
        values = {
            self.places[path]: self.parameters[path].value_of(key) for path, key in keys.items()
        }
        return with_values(self.configuration, values)

    def folder(self, number: int) -> Path:
        """Return a trial's folder."""
        return self.out / f"trial_{number:04d}"

    def run(self, number: int, keys: Mapping[str, Any], seed: int) -> PlannedRun:
        """Return one run of a trial."""
        folder = self.folder(number)
        # what the test says must not decide
        text = as_text({**self.with_keys(keys), "test_after_fit": False})
        return PlannedRun(Variant(folder.name, ()), seed, text, folder / f"seed_{seed}")


def plan_search(
    search: Search, configs: Sequence[str], options: Sequence[str], *, out: Path, resolve: Resolve
) -> Plan:
    """Read the configuration, and try whether it takes the ends of every range and every choice.

    Args:
        search: what is searched.
        configs: further files of the configuration, as they were named.
        options: further words of every run's command line.
        out: folder of the search.
        resolve: from the words of a command line to the complete configuration as YAML.

    Raises:
        ConfigurationError: if anything is refused, before any trial starts.
    """
    files = [*(str(path.absolute) for path in search.configs), *configs]
    if not files and search.base is None:
        raise ConfigurationError(
            "there is no configuration to search: give --config, as you give it to fit, or configs "
            "in the search's file"
        )
    configuration = yaml.safe_load(resolved(files, [search.base or {}], options, resolve))
    parameters = search.parameters
    places = {path: place_of(configuration, path) for path in parameters}
    by_place: dict[Place, str] = {}
    for path, place in places.items():
        if place in by_place:
            raise ConfigurationError(
                f"space: {by_place[place]} and {path} are the same option: name it once"
            )
        by_place[place] = path
    seed = configuration.get("seed_everything")
    own = int(seed) if isinstance(seed, int) and not isinstance(seed, bool) else 0
    seeds = [own] if search.seeds is None else read_seeds(search.seeds, "search")
    plan = Plan(configuration, parameters, places, seeds, out)
    if search.pruner == "hyperband" and plan.num_rounds < 1:
        raise ConfigurationError(
            "search: pruner hyperband needs trainer.max_epochs, the rounds of a whole trial"
        )
    _check_ends(plan, resolve)
    return plan


def _check_ends(plan: Plan, resolve: Resolve) -> None:
    ends = {path: parameter.ends for path, parameter in plan.parameters.items()}
    for number in range(max(map(len, ends.values()))):
        values = {path: own[min(number, len(own) - 1)] for path, own in ends.items()}
        placed = {plan.places[path]: value for path, value in values.items()}
        try:
            resolved([], [with_values(plan.configuration, placed)], [], resolve)
        except ConfigurationError as error:
            shown = ", ".join(f"{path}: {value}" for path, value in values.items())
            raise ConfigurationError(f"space: with {shown}: {error}") from error
