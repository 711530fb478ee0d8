"""What a malformed configuration is: something that runs, and one thing in it that cannot."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

NAN, INF = math.nan, math.inf

# What an option may be given that means one thing and takes another.
COUNT = ("many", 1.5, 0, -1)  # of something that there must be
COUNT_OR_NONE = ("many", 1.5, -1)  # 0 is one of them
ABOVE_ZERO = ("much", 0, -1, NAN, INF)
LENGTH = ("much", 0, -1, NAN)  # infinite ones bound nothing
AT_LEAST_ZERO = ("much", -1, NAN, INF)
FRACTION = ("half", 0, -0.5, 1.5, NAN, INF)  # in (0, 1]
PART = ("half", -0.5, 1.5, NAN, INF)  # in [0, 1]
SWITCH = ("maybe", 7)
CHOICE = ("neither", 3)


@dataclass(frozen=True)
class Row:
    """A refusal that is expected.

    Attributes:
        option: its path in the YAML, as the message must tell it.
        value: what it is given there.
        config: what is laid over the configuration that runs.
        says: words that the message has besides.
        words: of the command line, after everything else.
        name: what the message calls the option, if it is found only when the run starts.
        command: ``fit``, or another one.
        python: builds the refused object in Python.
    """

    option: str
    value: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    words: tuple[str, ...] = ()
    name: str = ""
    command: str = "fit"
    python: tuple[str, Mapping[str, Any]] | None = None

    def __str__(self) -> str:
        """As pytest shows it."""
        return f"{self.option}={self.value}"[:90].replace("fl_lightning.", "")


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return the configuration that has a value at a dotted path; ``[]`` after a name is a list.

    Example:
        >>> nested("federation.updates[].init_args.bits", 0)
        {'federation': {'updates': [{'init_args': {'bits': 0}}]}}
    """
    for name in reversed(path.split(".")):
        value = {name.removesuffix("[]"): [value] if name.endswith("[]") else value}
    return value


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers over each other, as several ``--config`` files are; lists are replaced."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(value, Mapping)
            other = both and "class_path" in value and value["class_path"] != old.get("class_path")
            result[key] = merged(old, value) if both and not other else copy.deepcopy(value)
    return result


def refused(
    place: str,
    class_path: str,
    needed: Mapping[str, Any] | None = None,
    *,
    around: Mapping[str, Any] | None = None,
    at_start: Sequence[str] = (),
    **bad: Sequence[Any],
) -> Iterator[Row]:
    """Yield what a class must refuse: malformed values, an option it does not have, one that lacks.

    Args:
        place: path of the option that takes the class; ``[]`` behind it if it takes a list.
        class_path: of the class.
        needed: options that are right.
        around: what else the configuration needs.
        at_start: options that only the run can judge.
        bad: malformed values by option.
    """
    needed = dict(needed or {})

    def row(option: str, value: Any, options: Mapping[str, Any], **more: Any) -> Row:
        spec = {"class_path": class_path, "init_args": options}
        path = f"{place.replace('[]', '[0]')}.init_args.{option}".rstrip(".")
        return Row(path, value, merged(around or {}, nested(place, spec)), **more)

    for option, values in bad.items():
        for value in values:
            options = {**needed, option: value}
            python = None if option in at_start else (class_path, options)
            name = option if option in at_start else ""
            yield row(option, value, options, name=name, python=python)
    first = next(iter(bad), "")
    typed = next(v for v in (*bad.get(first, ()), 1))
    wrong = f"{first}x" if first else "anything"
    yield row(wrong, "", {**needed, wrong: typed}, says="not accepted")
    given_below = ("fl_lightning.ImageClassifier", "fl_lightning.FederatedDataModule")
    for option in () if class_path in given_below else required(class_path):
        if option in needed:
            rest = {name: value for name, value in needed.items() if name != option}
            yield row(option, "", rest, says="required|must be a mapping with")


def required(class_path: str) -> list[str]:
    """Return the options that have no default."""
    parameters = inspect.signature(imported(class_path)).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name != "params"]


def imported(class_path: str) -> Any:
    """Return a class by its name."""
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)
