"""Rewrites a message of jsonargparse as one sentence: path, allowed values, given value, a suggestion.

jsonargparse has a parser for each class in a configuration. The innermost parser, which has the wrong option, makes
the sentence from the option's type. Each parser around it puts its own option ahead of the path:

    fraction must be a number or null, got abc                                     parser of UniformCohort
    cohort.init_args.fraction must be a number or null, got abc                    parser of Federation
    federation.cohort.init_args.fraction must be a number or null, got abc         parser of the command line
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import Callback, callbacks
from torch.optim import Optimizer

from fl_lightning.cli.names import no_such_class, paths, where_listed
from fl_lightning.core.errors import close_to, did_you_mean
from fl_lightning.core.kinds import IN_WORDS, alternatives, entries, in_words, is_accepted
from fl_lightning.core.public_names import public_paths
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Attackers, Federation

MOST_CHARACTERS = 500
# classes written without class_path in the YAML: their options stand directly below the option's name
BARE = (Federation, Attackers)
# classes whose options are those of a block
_BLOCKS = {Federation: "federation.", FederatedDataModule: "data."}

# options of the parser itself, which are not suggested
_UNLISTED = ("help", "print_shtab", "==SUPPRESS==")
# marks around a sentence, by which outer parsers find it; the first is also ahead of every other path in it
_PATH, _END = "\x02", "\x03"
# mark that the outermost parser, which knows the whole path, replaces by the command that lists the classes
_LISTED = "\x04"
_SENTENCE = re.compile(f"{_PATH}[^{_END}]*{_END}")
_OPTION = re.compile(r'Parser key "([^"]+)"')
_VALUE = re.compile(
    r"(?:Given value: |Got value: |Expected a dot import path string: |Unexpected import path format: )(.*)$",
    re.MULTILINE,
)
_NUMBER = re.compile(
    r"Not of type \w+: (?:invalid literal for int\(\) with base 10: ')?(.*?)(?:'| does not| not an?)"
)
_CLASS_PATH = re.compile(r"class_path['\"]?[=:] ?['\"]([\w.]+)")
_NESTED = re.compile(r"NestedArg\(key='(.*?)', val='(.*?)'\)")
_UNKNOWN = re.compile(
    r"[Uu]nrecognized arguments: -*(?P<word>[^\s=]+)[\s=]?(?P<value>.*)|"
    r"(?:Group '(?P<group>[^']+)' does not accept option|Subcommand '\w+' does not accept option|Option) "
    r"'(?P<option>[^']+)'"
)
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_NO_NAME = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_BLOCK = re.compile(r'Parser key "(.+?)": Unable to load config "(.*?)"')
# init_args that are no mapping, e.g. null if all lines below init_args are comments
_NO_OPTIONS = re.compile(
    r"\W*(?:Namespace\()?class_path\W+[\w.]+\W+init_args['\"]?[=:](?! ?(?:\{|Namespace)) ?(.*)[})]"
)
_IN_BLOCK = re.compile(r'(?s)Parser key ".+Unable to load config.+(Parser key "([^"]+)".*)')
_NO_FILE = re.compile(r"Not of type Path_\w+: (.)(.*)")
_YAML_WORDS: Mapping[Any, str] = {
    **IN_WORDS,
    bool: "true or false",
    str: "text",
    type(None): "null",
    **dict.fromkeys((Sequence, Iterable), "a list"),
    Mapping: "a mapping",
    timedelta: "a time such as 00:12:00:00",
    Path: "a path",
    PositiveInt: "a whole number above 0",
    NonNegativeInt: "a whole number, at least 0",
    Callable: "a class",
    **dict.fromkeys(BARE, "a mapping of options"),
}


def sentence(message: str, parser: ArgumentParser, owner: Any = None) -> str:
    """Rewrite an error message of jsonargparse as one sentence that begins with the option's path.

    Args:
        message: message of jsonargparse.
        parser: parser that reports the error.
        owner: class whose options the parser has; None for the parser of a command line.
    """
    option = _OPTION.match(message)
    key = "" if option is None else option[1]
    inner = _SENTENCE.findall(message)
    if inner:  # from a parser inside this one, or from this one before
        deepest: str = max(inner, key=lambda told: told.partition(" ")[0].count("."))
        number = _failing_entry(_given(message))[0]
        return deepest.replace(_PATH, f"{_path_to(owner)}{key}{number}.") if key else deepest
    if block := _IN_BLOCK.match(message):  # a block in one word, with a wrong option inside
        message, key = block[1], block[2]
    if block := _NO_BLOCK.search(message):
        return f"{block[1]} must be a mapping of options, got {block[2]}{_END}"
    kinds = {action.dest: getattr(action, "_typehint", None) for action in _actions(parser)}
    told = _of_name(message, parser, owner, [*kinds]) or _of_value(
        message, key, kinds.get(key), owner
    )
    if not told:
        plain = " ".join(_OPTION.sub("", message, count=1).split()).strip(" :.")
        where = f"{key}: " if key not in plain else ""
        told = f"{_path_to(owner)}{where}{shortened(plain)}. See --help for the options."
    return f"{told}{_END}"


def without_marks(told: str) -> str:
    """Return an error sentence in printable form, without the placeholders that nested parsers leave in it."""
    told = told.replace(_PATH, "").replace(_END, "")
    return shortened(told.replace(_LISTED, where_listed(told.partition(" ")[0])))


def _path_to(owner: Any) -> str:
    return _PATH if owner in (None, *BARE) else f"{_PATH}init_args."


def _actions(parser: Any) -> list[Any]:
    """Return the options (argparse's actions) of a parser and its subcommands, except options that print help."""
    inner = parser._subcommands_action.choices.values() if parser._subcommands_action else ()
    every = [action for one in (parser, *inner) for action in one._actions]
    return [each for each in every if each.dest.rpartition(".")[2] not in _UNLISTED]


def _of_name(message: str, parser: Any, owner: Any, options: Sequence[str]) -> str:
    """Return the error sentence if a parser's message is about an unknown or a missing option; else an empty text."""
    at, by = _path_to(owner), f" by {owner.__name__}" if owner else ""
    if match := _UNKNOWN.search(message):
        name = match["word"] or match["option"]
        name = f"{match['group']}.{name}" if match["group"] else name
        given = f", got {match['value']}" if match["value"] else ""
        advice = close_to(name, options)
        if owner is Optimizer:  # the base class, because no class was given
            advice = "Give the optimizer's class: class_path: torch.optim.SGD, …"
        return f"{at}{name}: {name!r} is not accepted{by}{given}. {advice}"
    if match := _REQUIRED.search(message):
        names = match[1].split(", ")
        outer, _, inner = names[0].rpartition(".")
        if outer and owner:  # the parser gives this message also for values that are no mapping
            shape = f"{outer.rpartition('.')[2]}: {{{inner}: …}}"
            return f"{at}{outer} must be a mapping with {inner}: write {shape}"
        commands = parser._subcommands_action.choices if parser._subcommands_action else ()
        if outer in commands:  # a subcommand is not a part of the path
            names = [name.removeprefix(f"{outer}.") for name in names]
        paths_of = ", ".join(f"{at}{name}" for name in names)
        if len(names) > 1:
            return f"{paths_of} are required{by}: give them values"
        return f"{paths_of} is required{by}: give it a value"
    return ""


def _of_value(message: str, key: str, hint: Any, owner: Any) -> str:
    """Return the error sentence for a wrong value or an unknown class; empty if the option's type is unknown."""
    path, given = f"{_path_to(owner)}{key}", _given(message)
    number, entry = _failing_entry(given)
    inner = [one for kind in alternatives(hint) for one in entries(kind) if not _is_plain(kind)]
    if number and inner:
        path, hint, given = f"{path}{number}", inner[0], entry
    if match := _NO_NAME.search(message):
        return f"{path}: {no_such_class(match[1], match[2])} {_LISTED}"
    if match := _NO_MODULE.search(message):
        told = f"there is no module {match[1]!r}: install it, or correct its name"
        return f"{path}: {told}. {_LISTED}"
    if match := _NO_FILE.search(message):
        return f"{path}: {match[1].lower()}{match[2]}. See --help for the options."
    if hint is None:
        return ""
    if nested := _NESTED.fullmatch(given or ""):
        told = f"got {nested[2]}, but {key} has no class yet: give {key} a class first"
        return f"{path}.{nested[1]}: {told}. {_LISTED}"
    if options := _NO_OPTIONS.fullmatch(given or ""):
        shown = "null" if options[1] == "None" else options[1]
        return f"{path}.init_args must be a mapping of options, got {shown}"
    name = f"{_BLOCKS.get(owner, '')}{key}"
    return f"{path} must be {_allowed(name, hint, given, owner)}"


def _given(message: str) -> str | None:
    """Return the refused value as the parser's message shows it; None if the message shows none."""
    whole = [value.partition(". Got value: ")[0] for value in _VALUE.findall(message)]
    shown = [*_NUMBER.findall(message), *whole]
    return shown[-1] if shown else None


def _failing_entry(given: str | None) -> tuple[str, str]:
    """Return index, such as ``[2]``, and text of the first entry that the parser refuses in a list.

    The parser has already converted the entries ahead of it to namespaces. Both are empty for other values.
    """
    parts, depth = [""], 0
    for mark in given[1:-1] if given and given.startswith("[") else "":
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and not depth:
            parts.append("")
        else:
            parts[-1] += mark
    refused = [n for n, part in enumerate(parts) if not part.strip().startswith("Namespace(")]
    if parts == [""] or not refused:
        return "", ""
    return f"[{refused[0]}]", parts[refused[0]].strip(" '")


def _allowed(name: str, hint: Any, given: str | None, owner: Any) -> str:
    """Return the end of an error sentence: the allowed values, the given value, and how to give a class.

    Args:
        name: name of the option, with its block.
        hint: type of the option.
        given: its value as the parser shows it; None if it does not show it.
        owner: class whose option it is, or None.
    """
    kinds = sorted(alternatives(hint), key=lambda kind: kind is type(None))
    plain = [kind for kind in kinds if _is_plain(kind)]
    is_foreign = owner is not None and not owner.__module__.startswith("fl_lightning.")
    if is_foreign and {*plain} - {type(None)}:  # in YAML, e.g. a number and not a tensor
        kinds = plain
    words = " or ".join(dict.fromkeys(in_words(kind, _YAML_WORDS) for kind in kinds))
    spec = _CLASS_PATH.search(given or "")
    is_list = (given or "").startswith("[")
    if spec and is_list and not any(map(entries, kinds)):
        return f"{words}, got a list: give one, without brackets. {_LISTED}"
    if spec and not is_list and all(map(entries, {*kinds} - {type(None)})):
        return f"{words}, got {spec[1]}: write it in brackets. {_LISTED}"
    shown = spec[1] if spec else shortened(given or "", 80)
    told = words if given is None else f"{words}, got {shown or 'an empty text'}"
    if kinds == plain:
        return told
    if is_foreign:  # its classes are not those of this package
        return f"{told}. Give a class that {owner.__name__} accepts, with its module: my_module.MyClass"
    how = "Give a class by class_path, and its options by init_args"
    if spec and "." not in shown:
        how = f"A class needs its whole path here, my_module.{shown}"
    advice = [f"{told}.", f"{how}.", _close_class(name, kinds, shown), _LISTED]
    return " ".join(filter(None, advice))


def _is_plain(kind: Any) -> bool:
    """Return whether YAML can write a type's values directly, like numbers and texts, without a class name."""
    if inner := entries(kind):
        return all(map(_is_plain, alternatives(inner[0])))
    plain = get_origin(kind) or kind
    return plain is Literal or (plain in _YAML_WORDS and plain is not Callable)


def _close_class(option: str, kinds: Sequence[Any], given: str) -> str:
    """Return a hint with the most similar class name of this package or of Lightning's callbacks; empty if none is."""
    block, _, name = option.partition(".")
    known = dict(paths(block, name))
    if not known:
        known = {name: path for name, path in public_paths().items() if is_accepted(name, kinds)}
    if any(inspect.isclass(kind) and issubclass(kind, Callback) for kind in kinds):
        known |= {name: f"lightning.pytorch.callbacks.{name}" for name in callbacks.__all__}
    named = re.search(r"[A-Za-z_][\w.]*", given)
    return did_you_mean(named[0].rpartition(".")[2], known) if named else ""


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Join a text into one line, and leave out its middle if it has more than ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"
