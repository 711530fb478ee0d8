"""Turns a message of the parser into one sentence: path, value, allowed values, a suggestion.

A message of jsonargparse is a tree: an option, the types that were tried for it, and the error of each type,
which may again be about an option. The useful part is a leaf far inside:

    Parser key "federation":
      Does not validate against any of the Union subtypes
      Errors:
        - Problem with given class_path 'fl_lightning.Federation':
            Parser key "cohort": ...
              Expected a <class 'float'>. Got value: abc
        - Expected a <class 'NoneType'>

The deepest leaves belong to the option that the user meant; each gives one reason.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch import callbacks

from fl_lightning.cli.checks import imported
from fl_lightning.cli.names import did_you_mean, no_such_class, paths, where_listed
from fl_lightning.core.public_names import public_paths

MOST_CHARACTERS = 500
# classes written without class_path in the YAML: their options stand directly below the option's name
BARE = ("Federation", "Attackers")
# path in the tree of a message: for each level its indentation, option and class, one of the latter None
Way = tuple[tuple[int, str | None, str | None], ...]

# Lines of a parser's message: levels of the tree, lines without content, a value, and reasons.
_LEVEL = re.compile(
    r'Parser key "(?P<key>[^"]+)":\s*|'
    r"Problem with given class_path '(?P<class_path>[^']+)':\s*|"
    # a reason about an option of the callable, not about the callable itself
    r"Type .* expects a function or a callable class: (?=Parser key |Option '|Key \"|the following arguments)"
)
_FRAME = re.compile(
    r"Does not validate against any of|Subtypes: |Errors:$|Given value type: |Expected a path but|$"
)
_CLASS_PATH = re.compile(r"class_path['\"]?[=:] ?['\"](?P<path>[\w.]+)")
_NAME = re.compile(r"[\['\"]*(?P<path>[A-Za-z_][\w.]*)")
_GIVEN = re.compile(r"Given value: (?P<given>.*)$|(?P<text>.*?)\. Got value: (?P<got>.*)$")
_UNRECOGNISED = re.compile(
    r"[Uu]nrecognized arguments: (?P<name>[^\s=]+)[\s=]?(?P<rest>.*)|"
    r"does not accept option '(?P<option>[^']+)'"
)
_NOT_ACCEPTED = re.compile(r"Option '(?P<option>[^']+)' is not accepted")
_REQUIRED = re.compile(
    r"the following arguments are required: (?P<names>.*)|Key \"(?P<key>[\w.]+)\" is required"
)
_NO_NAME = re.compile(r".*module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_NO_MODULE = re.compile(r".*No module named '(?P<module>[\w.]+)'")
_NO_CLASS = re.compile(
    r"Import path |Unexpected import path format|Not a valid subclass of|Subclasses are disabled|Expected a dot import path|"
    r"Expected an import path|.*Subclass types expect|a class path \(str\)|a dict with |"
    r"a dict without |.*expects a function or a callable class|Expected an instantiatable"
)
# a value that is no class, which the parser shows in the reason only
_NO_PATH = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (.*)")
_KIND = re.compile(
    r"does not (?:implement protocol|correspond to a subclass of) (\w+)|Not a valid subclass of (\w+)"
)
_ALLOWED = re.compile(
    r".*Expected a (?:typing\.)?Literal\[(?P<choices>.*)\]|"
    r".*Not of type \w*?(?P<number>Int|Float)\w*: does not conform to restriction v(?P<rule>.*)|"
    r"Expected an? (?:<class ')?(?P<type>[\w.]+)"
)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    **dict.fromkeys(("list", "tuple", "Sequence", "Iterable"), "a list"),
    "dict": "a mapping",
    "NoneType": "null",
    "timedelta": "a time such as 00:12:00:00",
}


@dataclass(frozen=True)
class Complaint:
    """Error of the parser about one option.

    Attributes:
        path: path of the option in the YAML.
        class_path: import path of the class that has the option; empty without a class.
        reasons: errors of the types that were tried, each once.
        given: the value as the parser shows it; None if it does not show it.
    """

    path: str
    class_path: str
    reasons: tuple[str, ...]
    given: str | None

    def inside(self, option: str) -> str:
        """Return the YAML path of an option of the class."""
        is_bare = self.class_path.rpartition(".")[2] in ("", *BARE)
        return f"{self.path}{'' if is_bare else '.init_args'}.{option}".lstrip(".")


def complaint(message: str) -> Complaint:
    """Return the deepest leaf of a parser's message, which names the option.

    Example:
        >>> lines = ['Parser key "trainer.max_epochs":', "  Errors:", "    - Expected a <class 'int'>"]
        >>> complaint(chr(10).join([*lines, "  Given value: 1.5"]))
        Complaint(path='trainer.max_epochs', class_path='', reasons=("Expected a <class 'int'>",), given='1.5')
    """
    leaves, values = _tree(message)
    if not leaves:
        return Complaint("", "", (" ".join(message.split()),), None)
    deepest = max(leaves, key=len)
    classes = [class_path or "" for _, key, class_path in deepest if key is None]
    class_path = classes[-1] if classes else ""
    # the parser names the class of a factory only after its reasons
    factory = re.search(r"Got value: .*class_path['\"]?[=:] ?['\"](?P<name>[\w.]+)", message)
    if classes and not class_path and factory:
        class_path = factory["name"]
    reasons = tuple(dict.fromkeys(leaves[deepest]))
    return Complaint(_path(deepest, values), class_path, reasons, values.get(deepest))


def _tree(message: str) -> tuple[dict[Way, list[str]], dict[Way, str]]:
    """Return the reasons at each place of a message's tree, and the values there."""
    leaves: dict[Way, list[str]] = {}
    values: dict[Way, str] = {}
    stack: list[tuple[int, str | None, str | None]] = []
    for line in filter(str.strip, message.splitlines()):
        text = re.sub(r"^\s*(- )?", "", line)
        indent = len(line) - len(text)
        while stack and stack[-1][0] >= indent:
            stack.pop()
        while level := _LEVEL.match(text):
            stack.append((indent, level["key"], level["class_path"]))
            text, indent = text[level.end() :], indent + 1
        way = tuple(stack)
        if value := _GIVEN.match(text):
            text = value["text"] or ""
            if value["got"] is None:
                values[way] = value["given"]
            else:  # of one of the types that were tried
                values.setdefault(way, value["got"])
        if not _FRAME.match(text):
            leaves.setdefault(way, []).append(text)
    return leaves, values


def _path(way: Way, values: Mapping[Way, str]) -> str:
    path = ""
    for depth, (_, key, class_path) in enumerate(way):
        if key is not None:
            path = f"{path}.{key}".lstrip(".")
            continue
        path += _index(values.get(tuple(way[:depth])), class_path)
        is_bare = (class_path or "").rpartition(".")[2] in BARE
        if not is_bare and any(deeper[1] for deeper in way[depth:]):
            path += ".init_args"
    return path


def _index(given: str | None, class_path: str | None) -> str:
    """Return the index of the list entry that names a class, such as ``[1]``; empty if unknown."""
    try:
        entries = ast.literal_eval(given or "")
    except (ValueError, SyntaxError):
        return ""
    named = [n for n, each in enumerate(entries) if class_path and class_path in str(each)]
    return f"[{named[0]}]" if isinstance(entries, list) and len(named) == 1 else ""


def sentence(message: str, options: Sequence[str] = ()) -> str:
    r"""Return a parser's message as one sentence.

    Example:
        >>> sentence("Parser key \"num_threads\": Expected a <class 'int'>. Got value: many")
        'num_threads must be a whole number, got many'
    """
    if unknown := _UNRECOGNISED.search(message):
        name = (unknown["name"] or unknown["option"]).lstrip("-")
        given = f", got {unknown['rest']}" if unknown["rest"] else ""
        return f"{name}: {name!r} is not accepted{given}. {close_to(name, options, most=0)}"
    found = complaint(message)
    rules = (
        _unknown_option,
        _missing_option,
        _unknown_class,
        _wrong_class,
        _wrong_type,
    )
    for rule in rules:
        if said := rule(found):
            return shortened(said)
    plain = " ".join(found.reasons).strip(" .")
    where = f"{found.path}: " if found.path and found.path not in plain else ""
    return f"{shortened(f'{where}{plain}')}. See --help for the options."


def _unknown_option(found: Complaint) -> str | None:
    match = next(filter(None, map(_NOT_ACCEPTED.match, found.reasons)), None)
    if match is None:
        return None
    option, owner = match["option"], found.class_path.rpartition(".")[2]
    advice = "See --help for the options."
    if owner == "Optimizer":  # the base of all: no class was named
        advice = "Say of which class it is: class_path: torch.optim.SGD, …"
    elif owner:
        advice = close_to(option, _options_of(found.class_path))
    by = f" by {owner}" if owner else ""
    return f"{found.inside(option)}: {option!r} is not accepted{by}. {advice}"


def _missing_option(found: Complaint) -> str | None:
    match = next(filter(None, map(_REQUIRED.match, found.reasons)), None)
    if match is None:
        return None
    given = [name.strip() for name in (match["names"] or match["key"]).split(",")]
    names = [found.inside(name) for name in given]
    owner = found.class_path.rpartition(".")[2]
    outer, _, inner = given[0].rpartition(".")
    if outer and owner:  # another value than a mapping reads the same to the parser
        shape = f"{outer.rpartition('.')[2]}: {{{inner}: …}}"
        return f"{found.inside(outer)} must be a mapping with {inner}: write {shape}"
    return f"{', '.join(names)} is required{f' by {owner}' if owner else ''}: give it a value"


def _unknown_class(found: Complaint) -> str | None:
    for reason in found.reasons:
        if match := _NO_NAME.match(reason):
            return no_such_class(found.path, match["module"], match["name"])
        if match := _NO_MODULE.match(reason):
            told = f"there is no module {match['module']!r}: it needs to be installed or spelt otherwise"
            return f"{found.path}: {told}. {where_listed(found.path)}"
    return None


def _wrong_class(found: Complaint) -> str | None:
    given = found.given
    if given is None:
        given = next((m[1] for m in map(_NO_PATH.match, found.reasons) if m), None)
    shown, given = _shown(given), given or ""
    if nested := re.fullmatch(r"NestedArg\(key='(.*)', val='(.*)'\)", given):
        said = (
            f"{found.path}.{nested[1]}: got {nested[2]}, but no class: give {found.path} one first"
        )
        return f"{said}. {where_listed(found.path)}"
    others = [reason for reason in found.reasons if not _NO_CLASS.match(reason)]
    if len(others) == len(found.reasons):
        return None
    kinds = [f"a {one or other}" for one, other in _KIND.findall(" ".join(found.reasons))]
    kind = f" that is {' or '.join(dict.fromkeys(kinds))}" if kinds else ""
    what, with_ = ("a list of classes", "each with") if given[:1] == "[" else ("a class", "with")
    allowed = [f"{what}{kind}, {with_} class_path and init_args", *_allowed(others)]
    must = f"{found.path} must be {' or '.join(allowed)}{shown}"
    owner, _, own = found.class_path.rpartition(".")
    if owner.partition(".")[0] not in (
        "",
        "fl_lightning",
    ):  # a user's class means others by the name
        return f"{must}. Give the class that {own} takes with its module: my_module.MyClass"
    block, _, option = found.path.replace(".init_args", "").partition(".")
    known = {**(paths(block, option) or public_paths())}
    if option == "callbacks":
        known |= {name: f"lightning.pytorch.callbacks.{name}" for name in callbacks.__all__}
    named = _CLASS_PATH.search(given) or _NAME.match(given)
    name = named["path"] if named else given
    hint = did_you_mean(name.rpartition(".")[2], known)
    if _CLASS_PATH.search(given) and "." not in name:
        hint = f"A class needs its whole path here, my_module.{name}. {hint}"
    return f"{must}. {hint}{where_listed(found.path)}"


def _wrong_type(found: Complaint) -> str | None:
    allowed = _allowed(found.reasons)
    if not allowed or not found.path:
        return None
    return f"{found.path} must be {' or '.join(allowed)}{_shown(found.given)}"


def _allowed(reasons: Sequence[str]) -> list[str]:
    """Return the allowed values in words, null last."""
    words = []
    for match in filter(None, map(_ALLOWED.match, reasons)):
        if match["choices"]:
            words.append(f"one of {match['choices'].replace(chr(39), '')}")
        elif match["number"]:
            kind = "a whole number" if match["number"] == "Int" else "a number"
            words.append(f"{kind} {match['rule']}")
        else:
            name = match["type"].rpartition(".")[2]
            words.append(_TYPES.get(name, f"a {name}"))
    return sorted(dict.fromkeys(words), key=lambda word: word == "null")


def _shown(value: str | None) -> str:
    if value is None:
        return ""
    value = value.partition(". Got value: ")[0]  # of the factory around it
    shown = value if len(value) <= 80 else f"{value[:79]}…"
    return f", got {shown or 'an empty text'}"


def close_to(name: str, names: Sequence[str], most: int = 30) -> str:
    """Return a suggestion for a misspelt name; without a close one, all names if they are few."""
    longer = [other for other in names if other.startswith(name)]
    close = longer or difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(names) > most:
        return "See --help for the options."
    return f"There are {', '.join(names)}." if names else "The class has no options."


def _options_of(class_path: str) -> list[str]:
    try:
        parameters = inspect.signature(imported(class_path)).parameters.values()
    except (ValueError, TypeError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in kinds and p.name != "params"]


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text on one line; of a long text the middle is left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"
