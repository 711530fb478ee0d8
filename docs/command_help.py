"""Writes ``help.json`` of the command line: ``python docs/command_help.py``.

It holds the classes that options take, with a line each, what docstrings say of the options of blocks, and
the pages of help: of all commands, of the block and of its options. The types of an option say which classes it
takes: those that are exported and either have a protocol's methods or are derived from a class, but for
bases.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse
from lightning.pytorch.cli import LightningCLI
from torch import nn
from typing_extensions import get_protocol_members, is_protocol

from fl_lightning.cli.commands import parser_of
from fl_lightning.cli.help import COMMANDS, GROUPS, OF_LIGHTNING, OPTIONS, OURS
from fl_lightning.cli.names import FILE
from fl_lightning.core.public_names import PACKAGES
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Federation
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

_OWNERS = {"federation": Federation, "data": FederatedDataModule}
_FIRST = """\
to begin with:
  fl-lightning fit --config quickstart            two minutes; 95 % of digits
  fl-lightning configs                            lists more of them
  fl-lightning fit --federation.help              the options of the block
  fl-lightning fit --federation.aggregator.help   what one of them takes
  fl-lightning init my_project                    your own module and data"""
_WHAT = {
    "--config NAME": "A configuration of the package (fl-lightning configs) or a file. Several are layered, later "
    "ones win.",
    "--federation.help": "The options of the federation, in groups.",
    "--model.PATH VALUE": "Any option by its path in the YAML, as in --model.init_args.optimizer.init_args.lr "
    "0.01; also --data.PATH, --federation.PATH, --trainer.PATH.",
    "--print_config": "Print the whole configuration and end.",
}
_FIT = {
    "--trainer.max_epochs N": "Rounds; epochs without a federation.",
    "--trainer.accelerator A": "cpu, gpu or auto.",
    "--trainer.devices N": "Processes on CPUs, GPUs otherwise.",
    "--ckpt_path PATH": "Resume from a checkpoint; last is that of the newest run of this configuration.",
    "--test_after_fit BOOL": f"{OPTIONS['test_after_fit']} (default: true)",
    "--report BOOL": f"{OPTIONS['report']} (default: true)",
    "--dry_run BOOL": OPTIONS["dry_run"],
    "--resume_changed BOOL": OPTIONS["resume_changed"],
}
_OTHERS = {
    "--ckpt_path PATH": "The checkpoint whose model is meant; last is that of the newest run of this "
    "configuration.",
}
_ALL = {
    "--num_threads N": OPTIONS["num_threads"],
    "--log_level LEVEL": OPTIONS["log_level"],
    "--seed_everything N": "Seed of all draws, 0 if not given.",
}


def contents() -> dict[str, dict[str, Any]]:
    """Return, by block, what its options say, and the classes that they take with a line each; pages."""
    found: dict[str, dict[str, Any]] = {}
    for block, owner in _OWNERS.items():
        hints = get_type_hints(owner.__init__)  # type: ignore[misc]  # of the class itself
        kinds = {option: [*_members(hint)] for option, hint in hints.items()}
        classes = {
            option: _entry(theirs)
            for option, theirs in kinds.items()
            if any(_is_a_base(kind, theirs) for kind in theirs)
        }
        found[block] = {"options": _options(owner), "classes": classes}
    found["pages"] = {
        "": help_of_all(),
        **{command: run_help(command) for command in OF_LIGHTNING},
        **{name: text for command in OURS for name, text in pages(command)},
        "--federation.help": block_help(found["federation"]["options"]),
        **{
            f"--{block}.{option}.help": classes_help(f"{block}.{option}", entry)
            for block in _OWNERS
            for option, entry in found[block]["classes"].items()
        },
    }
    return found


def help_of_all() -> str:
    """Return the list of all commands, which ``fl-lightning --help`` prints."""
    return "\n".join(
        [
            "usage: fl-lightning COMMAND [OPTIONS]",
            "",
            "Federated learning for PyTorch Lightning.",
            "",
            "commands:",
            *in_columns(COMMANDS, 11),
            "",
            _FIRST,
            "",
            "fl-lightning COMMAND --help shows a command's options, --version the version.",
        ]
    )


def run_help(command: str) -> str:
    """Return the help of one of Lightning's subcommands: the options that most people need."""
    return "\n".join(
        [
            f"usage: fl-lightning {command} --config NAME [OPTIONS]",
            "",
            OF_LIGHTNING[command],
            "",
            "the configuration:",
            *in_columns(_WHAT, 26),
            "",
            "this run:",
            *in_columns((_FIT if command == "fit" else _OTHERS) | _ALL, 26),
            "",
            f"All options, those of the Trainer among them: fl-lightning {command} --help all",
        ]
    )


def block_help(options: Mapping[str, Any]) -> str:
    """Return the help of the federation block's options, in groups."""
    lines: list[str] = []
    for title, names in GROUPS.items():
        texts = {name: _option(options[name]) for name in names}
        lines += [f"{title}:", *in_columns(texts, 20), ""]
    lines += [
        "In YAML a mapping, on the command line --federation.NAME VALUE. Classes of an",
        "option: --federation.NAME.help, as in --federation.cohort.help.",
    ]
    return "\n".join(lines)


def _option(option: Mapping[str, Any]) -> str:
    default = "" if option["default"] == "null" else f" (default: {option['default']})"
    return f"{option['help']}{default}".replace("`", "").replace("None", "null")


def classes_help(path: str, found: Mapping[str, Any]) -> str:
    """Return the help of an option that accepts classes: a line for each class."""
    classes = {of.rpartition(".")[2]: line for of, line in found["classes"].items()}
    lines = [
        *in_columns(classes, max(map(len, classes), default=0) + 2),
        *(f"  any {of}" for of in found["any"]),
    ]
    if not lines:
        bases = " or ".join(found["bases"])
        lines = [f"  a class of your own that derives from {bases}: see docs/extending.md"]
    example = next(iter(classes), "CLASS_PATH")
    return "\n".join(
        [
            f"{path} takes one of",
            "",
            *lines,
            "",
            f"The options of one: --{path}.help {example}",
        ]
    )


def in_columns(texts: Mapping[str, str], width: int) -> Iterator[str]:
    """Yield lines with two columns: names, in a column of the given width, and their texts."""
    for name, text in texts.items():
        first, *more = textwrap.wrap(text, 77 - width, break_on_hyphens=False) or [""]
        if len(name) >= width:  # on a line of its own
            yield f"  {name}"
            name = ""
        yield f"  {name.ljust(width)}{first}".rstrip()
        yield from (f"  {'':{width}}{line}" for line in more)


def pages(command: str) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, and of its own commands, with what is typed to get it."""
    if command in ("init", "configs"):  # which have no parser
        return
    parser = parser_of(command)
    inner = parser._subcommands_action
    if inner is None:
        yield command, page(command, parser)
        return
    texts = {name: one.description or "" for name, one in inner.choices.items()}
    lines = [
        f"usage: fl-lightning {command} COMMAND [OPTIONS]",
        *("", OURS[command], "", "commands:"),
        *in_columns(texts, max(map(len, texts)) + 2),
        *("", f"fl-lightning {command} COMMAND --help shows a command's options."),
    ]
    yield command, "\n".join(lines)
    for name, one in inner.choices.items():
        yield f"{command} {name}", page(f"{command} {name}", one)


def page(command: str, parser: Any) -> str:
    """Return the help of one parser: its options in groups, what each is, and its default."""
    own = [action for action in parser._actions if not action.option_strings]  # by their places
    words = " ".join([command, *(str(action.metavar) for action in own)])
    lines = [f"usage: fl-lightning {words} [OPTIONS]", "", *textwrap.wrap(parser.description, 79)]
    if own:
        lines += ["", *in_columns({str(a.metavar): str(a.help) for a in own}, 22)]
    for group in parser._action_groups:
        texts = dict(filter(None, map(_of_action, group._group_actions)))
        if texts:
            title = (group.title or "options").partition(": ")[0].rstrip(":")
            title = "in its file, or here" if title[:1].isupper() else title  # of a class
            lines += ["", f"{title}:", *in_columns(texts, 22)]
    return "\n".join(lines)


def _of_action(action: Any) -> tuple[str, str] | None:
    """Return an option as it is typed, and what is said of it; None for what every parser has."""
    names = [name for name in action.option_strings if not name.endswith("+")]
    if not names or names[0] in ("-h", "--help") or action.help in (None, argparse.SUPPRESS):
        return None
    names = [name for name in names if not name.endswith(".help")]
    if not names or names[-1] in ("--print_config", "--print_shtab"):
        return None
    text = " ".join(action.help.split())
    text = f"{text[:1].upper()}{text[1:]}".replace("None", "null")
    kind = getattr(action, "_typehint", None) or action.type
    if choices := [choice for part in (kind, *get_args(kind)) for choice in _choices(part)]:
        text += f" One of {', '.join(map(str, choices))}."
    if getattr(action, "required", False):
        text += " Required."
    elif isinstance(action.default, bool):
        text += f" (default: {str(action.default).lower()})"
    elif isinstance(action.default, int | float | str) and action.default != argparse.SUPPRESS:
        text += f" (default: {action.default})"
    return f"{', '.join(names)} {_placeholder(names[-1], kind)}", text


def _choices(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _placeholder(name: str, kind: Any) -> str:
    """Return what stands for an option's value."""
    kinds = [part for part in (kind, *get_args(kind)) if inspect.isclass(part)]
    if any(issubclass(part, bool) for part in kinds):
        return "BOOL"
    if any(issubclass(part, int) for part in kinds) and str not in kinds:
        return "N"
    return name.rpartition("_")[2].lstrip("-").upper()


def as_text() -> str:
    """Return the file's content."""
    return json.dumps(contents(), indent=1, ensure_ascii=False) + "\n"


def _options(owner: type) -> dict[str, dict[str, str]]:
    """Return what the docstring says of each option, and its default as YAML has it."""
    documented = f"{owner.__doc__}\n{inspect.cleandoc(owner.__init__.__doc__ or '')}"  # type: ignore[misc]
    texts = {p.arg_name: p.description or "" for p in parse(documented).params}
    parameters = inspect.signature(owner).parameters.values()
    return {
        parameter.name: {
            "help": " ".join(texts[parameter.name].split()),
            "default": json.dumps(parameter.default),
        }
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def _entry(kinds: list[type]) -> dict[str, Any]:
    theirs = [kind for kind in kinds if kind.__module__.startswith("torch.")]
    return {
        "classes": _classes(kinds),
        "any": [f"{kind.__name__} of {kind.__module__.rpartition('.')[0]}" for kind in theirs],
        "bases": [kind.__name__ for kind in kinds],
    }


def _classes(kinds: list[type]) -> dict[str, str]:
    """Return the paths of the exported classes that an option takes, and their first lines."""
    found: dict[type, str] = {}
    owners = _OWNERS.values()  # data around data
    for package in PACKAGES[:6]:  # the others have no classes for these blocks
        module = import_module(package)
        for name in module.__all__:
            exported = getattr(module, name)
            if not inspect.isclass(exported) or _is_a_base(exported, kinds) or exported in owners:
                continue
            if any(_is_a(exported, kind) for kind in kinds):
                found.setdefault(exported, f"{package}.{name}")
    return {path: _first_line(kind) for kind, path in found.items()}


def _is_a_base(found: type, kinds: list[type]) -> bool:
    """Whether others are derived from a class, which then is nobody's option."""
    if inspect.isabstract(found) or is_protocol(found):
        return True
    return found in kinds and (
        bool(found.__subclasses__()) or found.__module__.startswith("torch.")
    )


def _members(hint: Any) -> Iterator[type]:
    """Yield the classes in a union, and in what it is made of."""
    if inspect.isclass(hint) and hint.__module__ not in ("builtins", "typing"):
        yield hint
    for part in get_args(hint):
        yield from _members(part)


def _is_a(found: type, kind: type) -> bool:
    if not is_protocol(kind):
        return issubclass(found, kind) and not issubclass(found, MaskedOptimizer)  # a client's
    if issubclass(found, nn.Module | LightningCLI):  # whose methods have names of many protocols
        return False
    methods = [m for m in get_protocol_members(kind) if callable(getattr(kind, m, None))]
    return not is_protocol(found) and all(callable(getattr(found, m, None)) for m in methods)


def _first_line(found: type) -> str:
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(as_text(), encoding="utf-8")
