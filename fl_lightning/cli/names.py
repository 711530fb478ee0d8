"""Short names of classes: ``correction: FedProx`` means ``class_path: fl_lightning.FedProx``.

Every class that `fl_lightning.core.public_names` lists has a short name. Short names are replaced by import
paths before the parser sees them, in the ``federation`` block and in the options of `FederatedDataModule`. In
other blocks they are left alone: an option of a user's own data module may accept the text ``IID``. The classes
that each option accepts are listed in ``help.json``, which ``python docs/command_help.py`` writes.

Misspelt class names are found here too, by reading the source of the named module, which is faster than
importing it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError, did_you_mean
from fl_lightning.core.public_names import PACKAGES, public_paths

FILE = Path(__file__).with_name("help.json")
_OUR_DATA = (
    "",
    "FederatedDataModule",
    *(f"{package}.FederatedDataModule" for package in ("fl_lightning", "fl_lightning.data")),
)
_WORD = re.compile(
    r"--(?P<block>\w+)(?:\.init_args)?\.(?P<option>\w+)(?:\+|\.class_path|\.help)?(?:=(?P<value>.*))?"
)
_CLASS = re.compile(r"(?P<module>[a-z_]\w*(?:\.[a-z_]\w*)*)\.(?P<name>[A-Z]\w*)")
# words in the source of a module that may define further names when it is imported
_DYNAMIC = ("__getattr__", "globals(", "setattr(", "sys.modules", "exec(")
_CALLBACKS = "lightning.pytorch.callbacks"
# libraries whose classes have no short names here
_KNOWN = ("fl_lightning", "lightning", "pytorch_lightning", "torch", "torchmetrics", "torchvision")


@cache
def contents() -> dict[str, dict[str, Any]]:
    """Return the content of ``help.json``: option names by block, classes that options accept, and help pages."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def classes_of(block: str, option: str) -> dict[str, Any] | None:
    """Return descriptions of the classes that an option accepts; None if it accepts no class.

    Returns:
        A mapping: ``classes`` has a line of text for each import path, ``any`` and ``bases`` describe
        classes of other libraries.
    """
    found: dict[str, Any] | None = contents().get(block, {}).get("classes", {}).get(option)
    return found


def paths(block: str, option: str) -> Mapping[str, str]:
    """Return the import paths of the classes that an option accepts, by short name.

    Example:
        >>> paths("federation", "correction")["FedProx"]
        'fl_lightning.FedProx'
    """
    found = classes_of(block, option)
    return {path.rpartition(".")[2]: path for path in found["classes"]} if found else {}


def whole(words: Sequence[str], *, data: bool = False) -> list[str]:
    """Replace the short class names in a command line by import paths.

    Args:
        words: words of the command line.
        data: whether the options ``--data.…`` are those of `FederatedDataModule`.

    Example:
        >>> whole(["fit", "--federation.aggregator", "Krum", "--data.kind=IID"])[2:]
        ['fl_lightning.server.Krum', '--data.kind=IID']
    """
    found: list[str] = []
    expected: Mapping[str, str] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        is_ours = match is not None and (match["block"] == "federation" or data)
        option = paths(match["block"], match["option"]) if match and is_ours else {}
        if match and match["value"] in option:
            word = f"{word.removesuffix(match['value'])}{option[match['value']]}"
        found.append(expected.get(word, word))
        expected = option if match and match["value"] is None else {}
    return found


def expanded(content: Any) -> Any:
    """Replace short class names in the content of a YAML file by import paths.

    Example:
        >>> expanded({"federation": {"correction": "FedProx"}})
        {'federation': {'correction': {'class_path': 'fl_lightning.FedProx'}}}
        >>> expanded({"data": {"class_path": "my.Data", "init_args": {"partition": "IID"}}})
        {'data': {'class_path': 'my.Data', 'init_args': {'partition': 'IID'}}}
    """
    if not isinstance(content, dict):
        return content
    found = dict(content)
    if isinstance(options := found.get("federation"), dict):
        found["federation"] = _of_block("federation", options)
    data = found.get("data")
    if isinstance(data, dict) and data.get("class_path", "") in _OUR_DATA:
        if "class_path" not in data:  # of a FederatedCLI with a data module
            found["data"] = _of_block("data", data)
        elif isinstance(inside := data.get("init_args"), dict):
            found["data"] = {**data, "init_args": _of_block("data", inside)}
    return found


def _of_block(block: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _class_paths(_of_option(value, paths(block, str(name).rstrip("+"))))
        for name, value in options.items()
    }


def _of_option(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_of_option(each, names) for each in value]
    if isinstance(value, str) and value in names:
        return {"class_path": names[value]}
    return value


def _class_paths(content: Any) -> Any:
    if isinstance(content, list):
        return [_class_paths(each) for each in content]
    if not isinstance(content, dict):
        return content
    found = {key: _class_paths(value) for key, value in content.items()}
    if isinstance(name := found.get("class_path"), str) and "." not in name:
        found["class_path"] = public_paths().get(name, name)
    return found


def check_classes(words: Sequence[str], files: Sequence[Any]) -> None:
    """Raise if a class path names a class that does not exist, or a short class name is misspelt.

    Raises:
        ConfigurationError: with a suggestion.
    """
    given = [*_values(words), *(found for file in files for found in _class_names(file))]
    modules = {match["module"] for _, name, _ in given if (match := _CLASS.fullmatch(name))}
    # the parser also knows the short names of classes in the user's own modules
    is_known = all(module.partition(".")[0] in _KNOWN for module in modules)
    for path, name, is_class in given:
        match = _CLASS.fullmatch(name)
        if match and (is_class or match["module"].partition(".")[0] in _KNOWN):
            defined = names_in(match["module"])
            if defined is not None and match["name"] not in defined:
                said = no_such_class(match["module"], match["name"])
                raise ConfigurationError(f"{path}: {said} {where_listed(path)}")
        elif is_known and name[:1].isupper() and name.isidentifier():
            _check_short(path, name)


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each command-line option's name, with its dashes, and its value.

    Example:
        >>> list(options_of(["fit", "-c", "a.yaml", "--seed_everything=1"]))
        [('-c', 'a.yaml'), ('--seed_everything', '1')]
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, is_one, value = word.partition("=")
        if name.startswith("-"):
            yield name, value if is_one else following


def _values(words: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield each command-line option's path and value, and True if the value must be a class name."""
    for name, value in options_of(words):
        path = name.lstrip("-").removesuffix(".class_path").rstrip("+")
        yield path, value, name.endswith(".class_path")


def _class_names(content: Any, path: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield path and text of each option in a YAML file, and True if the text must be a class name."""
    if isinstance(content, dict):
        for name, value in content.items():
            if name == "class_path" and isinstance(value, str):
                yield path, value, True
            else:
                yield from _class_names(value, f"{path}.{name}".lstrip("."))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from _class_names(value, f"{path}[{number}]")
    elif isinstance(content, str):
        yield path, content, False


def no_such_class(module: str, name: str) -> str:
    """Return the error message for a class that does not exist in its module."""
    hint = did_you_mean(name, {each: f"{module}.{each}" for each in names_in(module) or ()})
    return f"module {module!r} has no attribute {name!r}. {hint}".rstrip()


def _check_short(path: str, name: str) -> None:
    block, _, option = path.partition(".")
    known = paths(block, option) if block == "federation" else {}
    if re.fullmatch(r"trainer\.callbacks(\[\d+\])?", path) and name not in public_paths():
        known = {each: f"{_CALLBACKS}.{each}" for each in names_in(_CALLBACKS) or ()}
    hint = did_you_mean(name, known)
    if hint and name not in known:
        raise ConfigurationError(
            f"{path} must name a class, got {name}. {hint} {where_listed(path)}"
        )


def where_listed(path: str) -> str:
    """Return a sentence that tells the user which command lists an option's classes."""
    block, _, inside = path.replace(".init_args", "").partition(".")
    option = re.split(r"\W", inside)[0]
    if classes_of(block, option) is None:
        return "See --help for the options."
    return f"--{block}.{option}.help lists the classes."


@cache
def names_in(module: str) -> frozenset[str] | None:
    """Return the class names in a module's source, without importing it; None if the source may not name all.

    Example:
        >>> "Adam" in names_in("torch.optim"), "Adamm" in names_in("torch.optim")
        (True, False)
        >>> names_in("no_such.module") is None
        True
    """
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)  # of an inner module, it would import the outer one
    except ValueError:  # for __main__, the program itself
        return None
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*inner)
    inside = (place / "__init__.py", place.with_suffix(".py")) if inner else (Path(spec.origin),)
    file = next(filter(Path.is_file, inside), None)
    if file is None or file.suffix != ".py":
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    is_lazy = "import *" in text or (
        module not in PACKAGES and any(word in text for word in _DYNAMIC)
    )
    # names in comments and functions are included, so that no existing class is refused
    return None if is_lazy else frozenset(re.findall(r"\b[A-Z]\w*", text))
