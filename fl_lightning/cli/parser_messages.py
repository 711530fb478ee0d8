"""A message of the parser as one sentence: path, value, allowed values, a suggestion.

A message of jsonargparse is a tree: an option, the types that were tried for it, and the error of each type,
which may again be about an option. The deepest option is the one that the user meant:

    Parser key "federation":
      Does not validate against any of the Union subtypes
      Errors:
        - Problem with given class_path 'fl_lightning.Federation':
            Parser key "cohort": ...
              Expected a <class 'float'>. Got value: abc
        - Expected a <class 'NoneType'>
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning.pytorch import callbacks

from fl_lightning.cli.checks import imported
from fl_lightning.cli.names import did_you_mean, no_such_class, paths, where_listed
from fl_lightning.core.kinds import accepts
from fl_lightning.core.public_names import public_paths
from fl_lightning.reports.layout import close_to

MOST_CHARACTERS = 500
# classes written without class_path in the YAML: their options stand directly below the option's name
BARE = ("Federation", "Attackers")

_LEVEL = re.compile(
    r'Parser key "(?P<key>[^"]+)":\s*|'
    r"Problem with given class_path '(?P<class_path>[^']+)':\s*|"
    # a reason about an option of the callable, not about the callable itself
    r"Type .* expects a function or a callable class: (?=Parser key |Option '|Key \"|the following arguments)"
)
_WITHOUT_CONTENT = re.compile(
    r"Does not validate against any of|Subtypes: |Errors:$|Given value type: |Expected a path but|$"
)
_VALUE = re.compile(r"Given value: (?P<given>.*)|(?P<reason>.*?)\. Got value: (?P<got>.*)")
_CLASS_PATH = r"class_path['\"]?[=:] ?['\"]([\w.]+)"
_UNRECOGNISED = re.compile(
    r"[Uu]nrecognized arguments: (?P<name>[^\s=]+)[\s=]?(?P<rest>.*)|"
    r"does not accept option '(?P<option>[^']+)'"
)
_NOT_ACCEPTED = re.compile(r"Option '([^']+)' is not accepted")
_REQUIRED = re.compile(r"the following arguments are required: (.*)|Key \"([\w.]+)\" is required")
_NO_NAME = re.compile(r".*module '([\w.]+)' has no attribute '(\w+)'")
_NO_MODULE = re.compile(r".*No module named '([\w.]+)'")
_NO_CLASS = re.compile(
    r"(?:Expected a dot import path string|Unexpected import path format): (?P<given>.*)|"
    r"Import path |Subclasses are disabled|Expected an import path|Expected an instantiatable|"
    r"Not a valid subclass of|.*Subclass types expect|a class path \(str\)|a dict with|"
    r".*expects a function or a callable class"
)
_KIND = re.compile(r"(?:correspond to a|implement|Not a valid) (?:subclass of|protocol) (\w+)")
_ALLOWED = re.compile(
    r".*Expected a (?:typing\.)?Literal\[(?P<choices>.*)\]|"
    r"Not of type (?P<restricted>\w*(?:Int|Float)\b)|"
    r"Expected an? (?:<class ')?(?:\w+\.)*(?P<type>\w+)"
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
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number, at least 0",
}


@dataclass
class Complaint:
    """Errors of the parser about one option, or about a class that is its value.

    Attributes:
        path: path of the option in the YAML.
        class_path: import path of the class whose option it is; empty without a class.
        reasons: errors of the types that were tried, each once.
        given: the value as the parser shows it; None if it does not show it.
    """

    path: str = ""
    class_path: str = ""
    reasons: list[str] = field(default_factory=list)
    given: str | None = None

    @property
    def owner(self) -> str:
        """Name of the class."""
        return self.class_path.rpartition(".")[2]

    def inside(self, option: str) -> str:
        """Return the YAML path of an option of the class."""
        is_bare = self.owner in ("", *BARE)
        return f"{self.path}{'' if is_bare else '.init_args'}.{option}".lstrip(".")

    def add(self, line: str) -> None:
        """Read a line of the message about the option: its value, or a reason."""
        if value := _VALUE.match(line):  # of one type that was tried, or of all of them
            line = value["reason"] or ""
            given, got = value["given"], value["got"]
            if given is not None or self.given is None:
                shown = got if given is None else given
                self.given = shown.partition(". Got value: ")[0]  # of the callable around it
        if not _WITHOUT_CONTENT.match(line) and line not in self.reasons:
            self.reasons.append(line)


def complaint(message: str) -> Complaint:
    """Return the errors of the deepest option in a parser's message.

    Example:
        >>> lines = ['Parser key "trainer.max_epochs":', "  Errors:", "    - Expected a <class 'int'>"]
        >>> complaint(chr(10).join([*lines, "  Given value: 1.5"]))
        Complaint(path='trainer.max_epochs', class_path='', reasons=["Expected a <class 'int'>"], given='1.5')
    """
    # the parser names the class of a callable only after its reasons
    of_callable = re.search(rf"Got value: .*{_CLASS_PATH}", message)
    stack = [(-1, Complaint())]
    found = {(0, "", ""): stack[0][1]}
    for line in message.splitlines():
        text = re.sub(r"^\s*(- )?", "", line)
        indent = len(line) - len(text)
        while text and stack[-1][0] >= indent:
            stack.pop()
        while level := _LEVEL.match(text):
            outer = stack[-1][1]
            path, class_path = outer.path, level["class_path"]
            if level["key"] is not None:
                path, class_path = outer.inside(level["key"]), outer.class_path
            elif class_path is None:
                class_path = of_callable[1] if of_callable else ""
            place = (len(stack), path, class_path)
            stack.append((indent, found.setdefault(place, Complaint(path, class_path))))
            text, indent = text[level.end() :], indent + 1
        stack[-1][1].add(text)
    return max((one for one in found.items() if one[1].reasons), key=lambda one: one[0][0])[1]


def sentence(message: str, options: Sequence[str] = ()) -> str:
    r"""Return a parser's message as one sentence.

    Args:
        message: the message.
        options: names of the parser's options.

    Example:
        >>> sentence("Parser key \"num_threads\": Expected a <class 'int'>. Got value: many")
        'num_threads must be a whole number, got many'
    """
    if unknown := _UNRECOGNISED.search(message):
        name = (unknown["name"] or unknown["option"]).lstrip("-")
        given = f", got {unknown['rest']}" if unknown["rest"] else ""
        return f"{name}: {name!r} is not accepted{given}. {close_to(name, options, most=0)}"
    found = complaint(message)
    said = next(filter(None, (_of_reason(found, reason) for reason in found.reasons)), "")
    said = said or _of_type(found)
    if not said:
        plain = re.sub(r"Not of type \w+: ", "", " ".join(found.reasons)).strip(" .")
        where = f"{found.path}: " if found.path not in plain else ""
        said = f"{shortened(f'{where}{plain}')}. See --help for the options."
    return shortened(said)


def _of_reason(found: Complaint, reason: str) -> str:
    """Return a sentence for an unknown or missing option, or an unknown class; empty for other reasons."""
    owner = found.owner
    by = f" by {owner}" if owner else ""
    if match := _NOT_ACCEPTED.match(reason):
        advice = close_to(match[1], _options_of(found.class_path))
        if owner == "Optimizer":  # the base of all: no class was named
            advice = "Say of which class it is: class_path: torch.optim.SGD, …"
        return f"{found.inside(match[1])}: {match[1]!r} is not accepted{by}. {advice}"
    if match := _REQUIRED.match(reason):
        names = (match[1] or match[2]).split(", ")
        outer, _, inner = names[0].rpartition(".")
        if outer and owner:  # another value than a mapping reads the same to the parser
            shape = f"{outer.rpartition('.')[2]}: {{{inner}: …}}"
            return f"{found.inside(outer)} must be a mapping with {inner}: write {shape}"
        return f"{', '.join(map(found.inside, names))} is required{by}: give it a value"
    if match := _NO_NAME.match(reason):
        return no_such_class(found.path, match[1], match[2])
    if match := _NO_MODULE.match(reason):
        told = f"there is no module {match[1]!r}: it needs to be installed or spelt otherwise"
        return f"{found.path}: {told}. {where_listed(found.path)}"
    return ""


def _of_type(found: Complaint) -> str:
    """Return a sentence with the allowed types of a value; empty if the parser does not name them."""
    not_classes = list(filter(None, map(_NO_CLASS.match, found.reasons)))
    given = found.given or next((match["given"] for match in not_classes if match["given"]), None)
    if nested := re.fullmatch(r"NestedArg\(key='(.*)', val='(.*)'\)", given or ""):
        option, value = nested.groups()
        said = f"{found.path}.{option}: got {value}, but no class: give {found.path} one first"
        return f"{said}. {where_listed(found.path)}"
    allowed = _allowed(found.reasons)
    is_foreign = found.class_path and not found.class_path.startswith("fl_lightning.")
    # of another library's classes, such as tensors for an optimizer's rate, a number is meant
    takes_class = not_classes and not (is_foreign and {*allowed} - {"null"})
    if takes_class:
        allowed.insert(0, _class_in_words(found.reasons, given or ""))
    if not allowed or not found.path:
        return ""
    shown = "" if given is None else f", got {shortened(given, 80) or 'an empty text'}"
    must = f"{found.path} must be {' or '.join(allowed)}{shown}"
    if takes_class and is_foreign:  # which means others by the name
        return f"{must}. Give the class that {found.owner} takes with its module: my_module.MyClass"
    return f"{must}. {_close_class(found, given or '')}" if takes_class else must


def _allowed(reasons: Iterable[str]) -> list[str]:
    """Return the allowed values besides classes in words, null last."""
    words = dict[str, None]()
    for match in filter(None, map(_ALLOWED.match, reasons)):
        name = match["type"] or match["restricted"]
        if match["choices"]:
            words[f"one of {match['choices'].replace(chr(39), '')}"] = None
        elif not _NO_CLASS.match(match.string):
            words[_TYPES.get(name, f"a {name}")] = None
    return sorted(words, key=lambda word: word == "null")


def _class_in_words(reasons: Iterable[str], given: str) -> str:
    kinds = dict.fromkeys(_KIND.findall(" ".join(reasons)))
    kind = f" that is a {' or a '.join(kinds)}" if kinds else ""
    what, with_ = ("a list of classes", "each with") if given[:1] == "[" else ("a class", "with")
    return f"{what}{kind}, {with_} class_path and init_args"


def _close_class(found: Complaint, given: str) -> str:
    """Suggest the class of this package, or Lightning's callback, whose name is like that of a value."""
    path, owner = found.path, None
    if found.class_path.startswith("fl_lightning."):
        owner = imported(found.class_path)
    block, _, option = path.replace(".init_args", "").partition(".")
    known = {**(paths(block, option) or public_paths())}
    if owner is not None and not paths(block, option):
        own = re.split(r"\W", path.rpartition("init_args.")[2])[0]
        known = {name: known[name] for name in known if accepts(owner.__init__, own, name)}
    if option == "callbacks":
        known |= {name: f"lightning.pytorch.callbacks.{name}" for name in callbacks.__all__}
    is_spec = re.search(_CLASS_PATH, given)
    named = is_spec or re.match(r"[\['\"]*([A-Za-z_][\w.]*)", given)
    name = named[1] if named else given
    hint = did_you_mean(name.rpartition(".")[2], known)
    if is_spec and "." not in name:
        hint = f"A class needs its whole path here, my_module.{name}. {hint}"
    return f"{hint}{where_listed(path)}"


def _options_of(class_path: str) -> list[str]:
    try:
        parameters = inspect.signature(imported(class_path)).parameters.values()
    except (ValueError, TypeError):  # no class at all, for one
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in kinds and p.name != "params"]


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text on one line; of a long text the middle is left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"
