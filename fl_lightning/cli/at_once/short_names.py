"""Names of classes without their module, as the catalogue lists them: ``correction: FedProx``.

Words of the command line and loaded YAML get the whole path before the parser sees them: of an option
by what it takes, of a ``class_path`` anywhere inside by any option that takes a class of that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.cli.at_once.catalogue import blocks, paths

_WORD = re.compile(
    r"--(?P<block>\w+)(?:\.init_args)?\.(?P<option>\w+)(?P<rest>\+|\.class_path|\.help)?"
    r"(?:=(?P<value>.*))?"
)


def with_whole_names(words: Sequence[str]) -> list[str]:
    """Return a command line whose classes have their whole paths.

    Example:
        >>> with_whole_names(["fit", "--federation.aggregator", "Krum", "--data.partition=IID"])[2:]
        ['fl_lightning.server.Krum', '--data.partition=fl_lightning.data.IID']
    """
    found: list[str] = []
    of: Mapping[str, str] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        option = paths(match["block"], match["option"]) if match else {}
        if match and option and match["value"] in option:
            word = f"{word.removesuffix(match['value'])}{option[match['value']]}"
        found.append(of.get(word, word))
        of = option if match and match["value"] is None else {}
    return found


def loader(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader of YAML that gives classes their whole paths.

    Args:
        load: from a text to what it says.
    """
    return lambda text: expanded(load(text))


def expanded(content: Any) -> Any:
    """Return what a file says, with whole names.

    Example:
        >>> expanded({"federation": {"correction": "FedProx"}})
        {'federation': {'correction': {'class_path': 'fl_lightning.FedProx'}}}
        >>> expanded({"aggregator": {"class_path": "Krum", "init_args": {"attackers": 1}}})
        {'aggregator': {'class_path': 'fl_lightning.server.Krum', 'init_args': {'attackers': 1}}}
    """
    if not isinstance(content, dict):
        return content
    found = _class_paths(content)
    for block in blocks():
        options = found.get(block)
        if isinstance(options, dict):
            inside: Any = options.get("init_args") if "class_path" in options else options
            for name in [*inside] if isinstance(inside, dict) else ():
                inside[name] = _of_option(inside[name], paths(block, name.rstrip("+")))
    return found


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
        found["class_path"] = paths().get(name, name)
    return found
