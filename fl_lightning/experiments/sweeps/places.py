"""Where an option is in a complete configuration, and the configuration with another value there."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fl_lightning.core.errors import ConfigurationError

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
    """Return the keys from a mapping to what a word names."""
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
