"""Names of classes without their module, as the catalogue lists them: ``correction: FedProx``.

Options of the ``federation`` block, on the command line and in YAML, and in YAML those of
`FederatedDataModule`, get whole paths before the parser sees them. Other blocks are somebody else's: an
option of their own data module may well take the text ``IID``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.cli.at_once.catalogue import paths

_OUR_DATA = (
    "",
    "FederatedDataModule",
    "fl_lightning.FederatedDataModule",
    "fl_lightning.data.FederatedDataModule",
)
_WORD = re.compile(
    r"--(?P<block>federation|data)(?:\.init_args)?\.(?P<option>\w+)(?P<rest>\+|\.class_path|\.help)?"
    r"(?:=(?P<value>.*))?"
)


def with_whole_names(words: Sequence[str], *, data: bool = False) -> list[str]:
    """Return a command line whose classes have their whole paths.

    Args:
        words: of the command line.
        data: whether the options ``--data.…`` are those of `FederatedDataModule`.

    Example:
        >>> with_whole_names(["fit", "--federation.aggregator", "Krum", "--data.kind=IID"])[2:]
        ['fl_lightning.server.Krum', '--data.kind=IID']
    """
    found: list[str] = []
    of: Mapping[str, str] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        is_ours = match is not None and (data or match["block"] == "federation")
        option = paths(match["block"], match["option"]) if match and is_ours else {}
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


def interpolating(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader that replaces references such as ``${model.image_size}`` by values of the same file."""

    def load_resolved(text: str) -> Any:
        content = load(text)
        if not isinstance(content, (dict, list)):
            return content
        from omegaconf import OmegaConf

        return OmegaConf.to_object(OmegaConf.create(content))

    return load_resolved


def expanded(content: Any) -> Any:
    """Return what a file says, with whole names.

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
        if "class_path" not in data:  # of a command line whose data module is known
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
        found["class_path"] = paths().get(name, name)
    return found
