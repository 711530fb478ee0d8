"""One sentence for what the parser complains of: the option, the value, what is allowed, what to do.

The parser asks protocols for methods of the same names and annotations, and bases for nothing abstract.
Of a class that is refused it says neither which method is missing nor how it must be written: we do.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from typing_extensions import get_protocol_members, is_protocol

from fl_lightning.cli.at_once.catalogue import options_with_classes, paths
from fl_lightning.cli.mistakes.complaints import Complaint, complaint

MOST_CHARACTERS = 500

_UNRECOGNISED = re.compile(
    r"[Uu]nrecognized arguments: (?P<name>[^\s=]+)[\s=]?(?P<rest>.*)|"
    r"does not accept option '(?P<option>[^']+)'"
)
_UNKNOWN = re.compile(r"(?:Option '(?P<option>[^']+)' is not accepted|.*does not have.*)$")
_REQUIRED = re.compile(
    r"the following arguments are required: (?P<names>.*)|Key \"(?P<key>[\w.]+)\" is required"
)
_NO_NAME = re.compile(r".*module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_NO_MODULE = re.compile(r".*No module named '(?P<module>[\w.]+)'")
_NO_CLASS = re.compile(
    r"Import path |Not a valid subclass of|Subclasses are disabled|Expected a dot import path|"
    r"Expected an import path|.*Subclass types expect|a class path \(str\)|a dict with |"
    r"a dict without |.*expects a function or a callable class|Expected an instantiatable"
)
_CHOICES = re.compile(r"Expected a (?:typing\.)?Literal\[(?P<choices>.*)\]")
_RESTRICTED = re.compile(
    r"Not of type \w*?(?P<kind>Int|Float)\w*: does not conform to restriction v(?P<rule>.*)"
)
_TYPE = re.compile(r"Expected an? (?:<class ')?(?P<type>[\w.]+)")
_WITH_CLASSES = re.compile(r"(?P<block>federation|data)(?:\.init_args)?\.(?P<option>\w+)")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "Sequence": "a list",
    "Iterable": "a list",
    "dict": "a mapping",
    "NoneType": "null",
    "timedelta": "a time such as 00:12:00:00",
}


def sentence(message: str, options: Sequence[str] = ()) -> str:
    r"""Return a parser's message as one sentence.

    Args:
        message: as the parser says it.
        options: names of all options, to suggest one.

    Example:
        >>> sentence("Parser key \"num_threads\": Expected a <class 'int'>. Got value: many")
        'num_threads must be a whole number, got many'
    """
    if unknown := _UNRECOGNISED.search(message):
        name = (unknown["name"] or unknown["option"]).lstrip("-")
        given = f", got {unknown['rest']}" if unknown["rest"] else ""
        return f"{name}: {name!r} is not accepted{given}. {close_to(name, options, most=0)}"
    found = complaint(message)
    for words in _WORDS:
        said = words(found)
        if said:
            return shortened(said)
    plain = " ".join(found.reasons).strip(" .")
    where = f"{found.path}: " if found.path and found.path not in plain else ""
    return f"{shortened(f'{where}{plain}')}. See --help for what there is."


def shortened(text: str) -> str:
    """Return a text on one line, without its middle if it is long."""
    line = " ".join(text.split())
    if len(line) <= MOST_CHARACTERS:
        return line
    half = MOST_CHARACTERS // 2
    return f"{line[:half]} … {line[-half:]}"


def close_to(name: str, names: Sequence[str], most: int = 30) -> str:
    """Return a suggestion for a misspelt name, or all the names if they are not too many.

    Example:
        >>> close_to("fractoin", ["fraction", "size"])
        "Did you mean 'fraction'?"
        >>> close_to("x", ["fraction", "size"])
        'There are fraction, size.'
    """
    longer = [other for other in names if other.startswith(name)]
    close = longer or difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(names) > most:
        return "See --help for what there is."
    return f"There are {', '.join(names)}." if names else "There is no option at all."


def options_of(class_path: str) -> list[str]:
    """Return the names of a class's options; none if there is no such class."""
    module, _, name = class_path.rpartition(".")
    try:
        parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    except (ImportError, AttributeError, ValueError, TypeError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in kinds and p.name != "params"]


def _unknown_option(found: Complaint) -> str | None:
    match = next((m for r in found.reasons if (m := _UNKNOWN.match(r)) and m["option"]), None)
    if match is None:
        return None
    option = match["option"]
    owner = found.class_path.rpartition(".")[2]
    by = f" by {owner}" if owner else ""
    path = (
        f"{found.path}.{option}"
        if not owner or owner in ("Federation", "Attackers")
        else (f"{found.path}.init_args.{option}")
    )
    known = options_of(found.class_path) if owner else []
    advice = close_to(option, known) if owner else "See --help for what there is."
    if owner == "Optimizer":  # the base of all: no class was named
        advice = "Say of which class it is: class_path: torch.optim.SGD, …"
    return f"{path}: {option!r} is not accepted{by}. {advice}"


def _missing_option(found: Complaint) -> str | None:
    match = next((m for r in found.reasons if (m := _REQUIRED.match(r))), None)
    if match is None:
        return None
    names = [name.strip() for name in (match["names"] or match["key"]).split(",")]
    owner = found.class_path.rpartition(".")[2]
    inside = "" if not owner or owner in ("Federation", "Attackers") else ".init_args"
    paths = ", ".join(f"{found.path}{inside}.{name}".lstrip(".") for name in names)
    return f"{paths} is required{f' by {owner}' if owner else ''}: give it a value"


def _unknown_class(found: Complaint) -> str | None:
    for reason in found.reasons:
        if match := _NO_NAME.match(reason):
            module, name = match["module"], match["name"]
            advice = _other_name(module, name)
            told = f"module {module!r} has no attribute {name!r}. {advice}"
            return f"{found.path}: {told} {_catalogue(found.path)}".strip()
        if match := _NO_MODULE.match(reason):
            told = f"there is no module {match['module']!r}: it needs to be installed or spelt otherwise"
            return f"{found.path}: {told}. {_catalogue(found.path)}".strip()
    return None


def _other_name(module: str, name: str) -> str:
    try:
        found = import_module(module)
    except ImportError:
        return ""
    close = difflib.get_close_matches(name, getattr(found, "__all__", dir(found)), n=1)
    return f"Did you mean {module}.{close[0]}?" if close else ""


def _unfinished_class(found: Complaint) -> str | None:
    for reason in found.reasons:
        if said := what_is_missing(reason, found.given or ""):
            return f"{found.path}: {said}"
    return None


def _wrong_class(found: Complaint) -> str | None:
    if not any(_NO_CLASS.match(reason) for reason in found.reasons):
        return None
    types = _allowed([r for r in found.reasons if not _NO_CLASS.match(r)])
    needed = _kinds(found.reasons)
    kind = f"a class{f' that is {needed}' if needed else ''}, with class_path and init_args"
    allowed = " or ".join([kind, *types])
    given = _given(found.given)
    hint = _other_class(found.path, found.given or "")
    return f"{found.path} must be {allowed}{given}. {hint}{_catalogue(found.path)}".strip()


def _kinds(reasons: Sequence[str]) -> str:
    """Return which protocols or base classes were asked for."""
    found = re.findall(
        r"does not (?:implement protocol|correspond to a subclass of) (\w+)|Not a valid subclass of (\w+)",
        " ".join(reasons),
    )
    return " or ".join(dict.fromkeys(f"a {one or other}" for one, other in found))


def _wrong_type(found: Complaint) -> str | None:
    allowed = _allowed(found.reasons)
    if not allowed or not found.path:
        return None
    return f"{found.path} must be {' or '.join(allowed)}{_given(found.given)}"


def _allowed(reasons: Sequence[str]) -> list[str]:
    """Return what values are allowed, in words."""
    words = []
    for reason in reasons:
        if match := _CHOICES.search(reason):
            words.append(f"one of {', '.join(str(c) for c in _choices(match['choices']))}")
        elif match := _RESTRICTED.search(reason):
            kind = "a whole number" if match["kind"] == "Int" else "a number"
            words.append(f"{kind} {match['rule']}")
        elif match := _TYPE.match(reason):
            name = match["type"].rpartition(".")[2]
            words.append(_TYPES.get(name, f"a {name}"))
    order = [word for word in words if word != "null"] + ["null"] * ("null" in words)
    return list(dict.fromkeys(order))


def _choices(text: str) -> list[Any]:
    try:
        return list(ast.literal_eval(f"[{text}]"))
    except (ValueError, SyntaxError):
        return [text]


def _given(value: str | None) -> str:
    """Return the end of a sentence that shows a value."""
    if value is None:
        return ""
    value = value.partition(". Got value: ")[0]  # of the factory around it
    shown = value if len(value) <= 80 else f"{value[:79]}…"
    return f", got {shown or 'an empty text'}"


def _other_class(path: str, given: str) -> str:
    """Return a suggestion for a class's name that is misspelt, or short where it must be whole.

    Example:
        >>> _other_class("data.partition", "LabelShards")
        'Did you mean fl_lightning.data.LabelShards? '
    """
    match = _WITH_CLASSES.match(path)
    names = paths(match["block"], match["option"]) if match else {}
    close = difflib.get_close_matches(given.rpartition(".")[2], names, n=1)
    return f"Did you mean {names[close[0]]}? " if close else ""


def _catalogue(path: str) -> str:
    """Return where the classes of an option are listed."""
    match = _WITH_CLASSES.match(path)
    if match is None or match["option"] not in options_with_classes(match["block"]):
        return "See --help for what there is."
    return f"--{match['block']}.{match['option']}.help lists what there is."


_WORDS = (
    *(_unknown_option, _missing_option, _unknown_class),
    *(_unfinished_class, _wrong_class, _wrong_type),
)


# the parser leaves out a path that is the whole value
_UNLIKE = re.compile(
    r"(?:\"(?P<path>[\w.]+)\" is not a subclass or implementer of|does not implement) "
    r"protocol \{?(?P<protocols>[\w,]+)"
)
_ABSTRACT = "Expected an instantiatable class, but "
# of a value: a class's path, or a mapping that names it
_GIVEN = re.compile(r"(?:.*class_path['\"]?[=:] ?['\"])?(?P<path>[\w.]+)")
# where protocols that users write classes for are exported
_PACKAGES = ("fl_lightning.data", "fl_lightning.sparsity", "fl_lightning.updates")


def what_is_missing(reason: str, given: str) -> str | None:
    """Return what a class lacks; None if that is not the matter.

    A class without a single method of the protocol was not meant to be one.

    Args:
        reason: what the parser says.
        given: the value that it says it of.

    Example:
        >>> said = "Import path fl_lightning.Mean does not implement protocol Partition"
        >>> what_is_missing(said, "fl_lightning.Mean") is None
        True
    """
    unlike, named = _UNLIKE.search(reason), _GIVEN.match(given)
    path = (unlike and unlike["path"]) or (named and named["path"])
    own = _imported(path or "")
    if own is None:
        return None
    if reason.startswith(_ABSTRACT) and inspect.isabstract(own):
        names = ", ".join(sorted(own.__abstractmethods__))
        return f"{path} is unfinished, it lacks {names}: write a class that has it"
    for name in unlike["protocols"].split(",") if unlike else ():
        protocol = _protocol(name)
        if protocol is None or not any(hasattr(own, member) for member in _members(protocol)):
            continue
        if written := "; ".join(_unlike(own, protocol)):
            return f"{path} is a {name} once it has, annotations and all: {written}"
    return None


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _protocol(name: str) -> type | None:
    for package in _PACKAGES:
        found: Any = getattr(import_module(package), name, None)
        if inspect.isclass(found) and is_protocol(found):
            return found
    return None


def _members(protocol: type) -> list[str]:
    """Return a protocol's members in the order in which they are written."""
    members = get_protocol_members(protocol)
    return [name for name in vars(protocol) if name in members]


def _unlike(own: Any, protocol: type) -> Iterator[str]:
    """Yield the protocol's members that a class has not, or writes otherwise."""
    for name in _members(protocol):
        wanted, has = getattr(protocol, name), getattr(own, name, None)
        if isinstance(wanted, property):
            if has is None:
                yield f"a property {name}"
        elif not inspect.isfunction(has) or not _is_like(has, wanted):
            yield f"{name}{inspect.signature(wanted)}".replace("'", "")


def _is_like(own: Any, wanted: Any) -> bool:
    try:
        hints, known = get_type_hints(own), get_type_hints(wanted)
    except NameError:
        return False
    names = list(inspect.signature(own).parameters), list(inspect.signature(wanted).parameters)
    return names[0] == names[1] and all(
        hint == Any or hints.get(name) == hint for name, hint in known.items()
    )
