"""Plan of a search: where its options are in the configuration, and the configuration of each trial."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fl_lightning.core.errors import ConfigurationError, close_to
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
    """Return the mapping keys that lead to an option in a configuration; the path may leave out ``init_args``.

    The last key may be missing in the configuration: the parser checks whether the class has such an option.

    Args:
        configuration: complete configuration.
        path: keys separated by dots; an entry of a list is its number, from 0.

    Raises:
        ConfigurationError: if a part of the path does not lead to a mapping or list.

    Example:
        >>> model = {"class_path": "my.Net", "init_args": {"lr": 0.1}}
        >>> place_of({"model": model}, "model.lr")
        ('model', 'init_args', 'lr')
    """
    keys: list[str | int] = []
    words = path.split(".")
    last = len(words) - 1
    for number, word in enumerate(words):
        node, owner = value_at(configuration, keys), ".".join(words[:number])
        inner = _keys(node, word, may_be_new=0 < number == last)
        if inner is None:
            raise ConfigurationError(f"space: {path}: {_what_is_there(node, word, owner)}")
        keys += inner
    return tuple(keys)


def _keys(node: Any, word: str, *, may_be_new: bool) -> list[str | int] | None:
    """Return the keys from a configuration node to the option that one word of a path names; None without such an option."""
    if isinstance(node, list):
        return [int(word)] if word.isdecimal() and int(word) < len(node) else None
    if not isinstance(node, Mapping) or word in node:
        return [word] if isinstance(node, Mapping) else None
    for inside in ("dict_kwargs", "init_args"):
        if word in (node.get(inside) or {}):
            return [inside, word]
    new = ["init_args", word] if "class_path" in node else [word]
    return [*new] if may_be_new else None


def _what_is_there(node: Any, word: str, owner: str) -> str:
    if isinstance(node, list):
        return f"{owner} is a list of length {len(node)}: name an entry by its number, from 0, got {word!r}"
    if isinstance(node, Mapping):
        known = [str(key) for key in [*node, *(node.get("init_args") or {})]]
        names = [key for key in known if key not in ("class_path", "init_args")]
        return f"{owner or 'the configuration'} has no {word!r}. {close_to(word, names)}"
    shown = "null" if node is None else repr(node)
    return (
        f"{owner} is {shown} in the configuration and has no option {word}: give it a class there, or under "
        "base"
    )


def value_at(configuration: Any, place: Sequence[str | int]) -> Any:
    """Return the value to which keys lead in a configuration; None if there is none."""
    node = configuration
    for key in place:
        if isinstance(node, Mapping) and key not in node:
            return None
        node = node[key]
    return node


def with_values(configuration: dict[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with new values for some options, each given by the keys that lead to it.

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
    """Return a short, unique name for each option's path: its last words, as few as make it unique.

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


@dataclass(frozen=True)
class Plan:
    """Complete configuration and searched options of a search; makes the runs of its trials.

    Attributes:
        configuration: complete configuration, with the user's own values.
        parameters: searched parameters, by path.
        places: keys that lead to each searched option, by path.
        seeds: seeds of the runs of each trial.
        out: folder of the search.
    """

    configuration: dict[str, Any]
    parameters: Mapping[str, Parameter]
    places: Mapping[str, Place]
    seeds: Sequence[int]
    out: Path

    @property
    def num_rounds(self) -> int:
        """Number of rounds of a complete trial; -1 without a limit."""
        rounds = self.configuration["trainer"]["max_epochs"]
        return -1 if rounds is None else int(rounds)

    @property
    def names(self) -> dict[str, str]:
        """Short, unique names of the searched options, by path of the option."""
        return short_names(list(self.parameters))

    @property
    def as_configured(self) -> dict[str, Any] | None:
        """Values that the user's configuration gives to the searched options, by path, as Optuna names them.

        None if a value is outside the space.
        """
        keys = {
            path: parameter.key_of(value_at(self.configuration, self.places[path]))
            for path, parameter in self.parameters.items()
        }
        return None if any(key is None for key in keys.values()) else keys

    def with_keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's configuration; ``keys`` are its values of searched options, as Optuna names them, by path."""
        values = {
            self.places[path]: self.parameters[path].value_of(key) for path, key in keys.items()
        }
        return with_values(self.configuration, values)

    def folder(self, number: int) -> Path:
        """Return the folder of the trial with this number."""
        return self.out / f"trial_{number:04d}"

    def run(self, number: int, keys: Mapping[str, Any], seed: int) -> PlannedRun:
        """Return a trial's run with one seed; ``keys`` are the trial's values, as Optuna names them, by path."""
        folder = self.folder(number)
        # the test set must not influence the choice
        text = as_text({**self.with_keys(keys), "test_after_fit": False})
        return PlannedRun(Variant(folder.name, ()), seed, text, folder / f"seed_{seed}")


def plan_search(
    search: Search, configs: Sequence[str], options: Sequence[str], *, out: Path, resolve: Resolve
) -> Plan:
    """Plan a search: read its configuration, and check that it accepts every choice and both ends of every range.

    Raises:
        ConfigurationError: if the configuration, or a value of the space, is invalid.
    """
    files = [*(str(path.absolute) for path in search.configs), *configs]
    if not files and search.base is None:
        raise ConfigurationError(
            "config: a search needs a configuration: give --config, as for fit, or configs in the file of "
            "--search"
        )
    configuration = yaml.safe_load(resolved(files, [search.base or {}], options, resolve))
    parameters = search.parameters
    places = {path: place_of(configuration, path) for path in parameters}
    by_place: dict[Place, str] = {}
    for path, place in places.items():
        if place in by_place:
            raise ConfigurationError(
                f"space: {by_place[place]} and {path} are the same option: remove one of them"
            )
        by_place[place] = path
    seed = configuration.get("seed_everything")
    own = int(seed) if isinstance(seed, int) and not isinstance(seed, bool) else 0
    seeds = [own] if search.seeds is None else read_seeds(search.seeds)
    plan = Plan(configuration, parameters, places, seeds, out)
    if search.pruner == "hyperband" and plan.num_rounds < 1:
        raise ConfigurationError(
            "pruner: hyperband needs the number of rounds of a complete trial: set trainer.max_epochs"
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
