"""What the parser complains of, read from its message.

A message of jsonargparse is a tree: an option, the types that were tried for it, what each of them
said of the value, which may again be about an option. The useful sentence is a leaf far inside:

    Parser key "federation":
      Does not validate against any of the Union subtypes
      Errors:
        - Problem with given class_path 'fl_lightning.Federation':
            Parser key "cohort": ...
              Expected a <class 'float'>. Got value: abc
        - Expected a <class 'NoneType'>

The deepest leaves are those of the option that was meant; each says one reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Written without class_path in the YAML: their options stand directly below the option's name.
BARE = ("Federation", "Attackers")

_KEY = re.compile(r'Parser key "(?P<name>[^"]+)":\s*(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<name>[^']+)':\s*(?P<rest>.*)")
_CALLABLE = re.compile(r"Type .* expects a function or a callable class: (?P<rest>.*)")
# what is said of an option of the callable, and not of the callable itself
_INSIDE = re.compile(r"Parser key |Option '|Key \"|the following arguments")
_GIVEN = re.compile(r"Given value: (?P<given>.*)")
_GOT = re.compile(r"^(?P<text>.*?)\. Got value: (?P<given>.*)$")
# Frames of the tree, and the type that every value of the command line might be: a path to a file.
_NOISE = re.compile(
    r"Does not validate against any of|Subtypes: |Errors:$|Given value type: |Expected a path but|$"
)
# the parser names the class of a factory only behind its complaint
_FACTORY = re.compile(r"Got value: .*class_path['\"]?[=:] ?['\"](?P<name>[\w.]+)")


@dataclass(frozen=True)
class Level:
    """A node on the way to a leaf.

    Attributes:
        indent: of its line.
        key: an option's name, or None.
        class_path: of a class, empty where the parser does not say which; None for an option.
    """

    indent: int
    key: str | None = None
    class_path: str | None = None


@dataclass(frozen=True)
class Complaint:
    """What is wrong with one option.

    Attributes:
        path: of the option in the YAML.
        class_path: of the class whose option it is; empty if it is none's.
        reasons: what the types said that were tried, each once.
        given: the value as the parser shows it; None if it does not.
    """

    path: str
    class_path: str
    reasons: tuple[str, ...]
    given: str | None


def complaint(message: str) -> Complaint:
    """Return what a message of the parser is about.

    Example:
        >>> lines = ['Parser key "trainer.max_epochs":', "  Errors:", "    - Expected a <class 'int'>"]
        >>> complaint(chr(10).join([*lines, "  Given value: 1.5"]))
        Complaint(path='trainer.max_epochs', class_path='', reasons=("Expected a <class 'int'>",), given='1.5')
    """
    leaves: dict[tuple[Level, ...], list[str]] = {}
    values: dict[tuple[Level, ...], str] = {}
    for way, text in _lines(message):
        if given := _GIVEN.match(text):
            values[way] = given["given"]
            continue
        if got := _GOT.match(text):
            text = got["text"]
            values.setdefault(way, got["given"])
        leaves.setdefault(way, []).append(text)
    if not leaves:
        return Complaint("", "", (" ".join(message.split()),), None)
    deepest = max(leaves, key=len)
    reasons = tuple(dict.fromkeys(leaves[deepest]))
    factory = _FACTORY.search(message)
    classes = [level.class_path for level in deepest if level.class_path is not None]
    class_path = classes[-1] if classes else ""
    if classes and not class_path and factory:
        class_path = factory["name"]
    return Complaint(_path(deepest, values), class_path, reasons, values.get(deepest))


def _lines(message: str) -> Iterator[tuple[tuple[Level, ...], str]]:
    """Yield the lines that say something, and the levels above each."""
    stack: list[Level] = []
    for line in message.splitlines():
        text = re.sub(r"^\s*(- )?", "", line)
        if not text:
            continue
        indent = len(line) - len(text)
        while stack and stack[-1].indent >= indent:
            stack.pop()
        text = _opened(stack, text, indent)
        if not _NOISE.match(text):
            yield tuple(stack), text


def _opened(stack: list[Level], text: str, indent: int) -> str:
    """Take the levels that a line opens onto the stack, and return what it says besides."""
    while True:
        if found := _KEY.match(text):
            stack.append(Level(indent, key=found["name"]))
        elif found := _CLASS.match(text):
            stack.append(Level(indent, class_path=found["name"]))
        elif (found := _CALLABLE.match(text)) and _INSIDE.match(found["rest"]):
            stack.append(Level(indent, class_path=""))
        else:
            return text
        text, indent = found["rest"], indent + 1


def _path(way: Sequence[Level], values: dict[tuple[Level, ...], str]) -> str:
    """Return the option's path in the YAML."""
    path = ""
    for depth, level in enumerate(way):
        if level.key is not None:
            path = f"{path}.{level.key}".lstrip(".")
            continue
        name = (level.class_path or "").rpartition(".")[2]
        path += _index(values.get(tuple(way[:depth])), level.class_path)
        if name not in BARE and any(deeper.key for deeper in way[depth:]):
            path += ".init_args"
    return path


def _index(given: str | None, class_path: str | None) -> str:
    """Return which entry of a list names a class, as ``[1]``; nothing if that is not known."""
    try:
        entries = ast.literal_eval(given or "")
    except (ValueError, SyntaxError):
        return ""
    if not isinstance(entries, list):
        return ""
    named = [n for n, each in enumerate(entries) if class_path and class_path in str(each)]
    return f"[{named[0]}]" if len(named) == 1 else ""
