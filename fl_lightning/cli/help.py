"""Help texts, at most 80 characters a line, printed without importing PyTorch.

They are ``--help`` of every command; ``--federation.help``, the options of the block in groups; and
``--federation.correction.help``, the classes that an option accepts. Texts from docstrings are stored in
``help.json``, which ``python docs/command_help.py`` writes, because the parser takes seconds to import.
The parser itself answers ``--federation.correction.help FedProx``, the options of one class, and
``fit --help all``, all options.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fl_lightning.cli.names import classes_of, contents

OF_LIGHTNING = {
    "fit": "Train over clients, or centrally without a federation block.",
    "validate": "Metrics of a model on the validation set, and every client's.",
    "test": "Metrics of a model on the test set.",
    "predict": "Predictions of a model for the data module's examples.",
}
OURS = {
    "init": "Make a project to start from: a module, data, a YAML, a test.",
    "configs": "List the configurations of the package, or copy one.",
    "report": "Make a run's report.html again, also while it trains.",
    "export": "Write a run's model as weights, adapters, a program or ONNX.",
    "compare": "Many runs from one file: variants x seeds, a table and a figure.",
    "sweep": "Search values for options: learning rates, steps, classes.",
    "search": "Find an architecture under constraints, without training.",
    "latency": "Measure the latency of a search space's networks on this device.",
    "network": "Train over a real network: a server, and sites that keep their data.",
}
COMMANDS = OF_LIGHTNING | OURS
_FIRST = """\
to begin with:
  fl-lightning fit --config quickstart            two minutes; 95 % of digits
  fl-lightning configs                            lists more of them
  fl-lightning fit --federation.help              the options of the block
  fl-lightning fit --federation.aggregator.help   what one of them takes
  fl-lightning init my_project                    your own module and data"""

# the options that this package adds to Lightning's subcommands
OPTIONS = {
    "federation": "Train over many clients. Without this block training is central.",
    "test_after_fit": "Test the last model when fit ends, if the data module has a test set.",
    "report": "Make report.html and figures/ in the run's folder when fit ends, a few seconds.",
    "num_threads": "Threads of a CPU computation; PyTorch chooses if null. Small models gain nothing from "
    "several, and lose much where other programs run as well.",
    "dry_run": "Train two rounds, where possible of at most 20 clients in each process, write nothing, and print an estimate of "
    "the whole run's seconds, memory and bytes.",
    "resume_changed": "With ckpt_path: resume although the configuration is not that of the run.",
    "log_level": "run.log, in the run's folder, keeps messages of this level and above: debug, info, warning or "
    "error.",
}
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
# options of the federation block by group, the most common ones first
GROUPS = {
    "what most people set": (
        *("cohort", "local_epochs", "local_steps", "correction", "aggregator"),
        *("server_optimizer", "on_client_failure"),
    ),
    "clients": ("personal", "client_state", "client_memory_gb", "devices", "attackers"),
    "what travels": ("updates", "download", "privacy"),
    "the server": ("min_replies", "server_schedule", "asynchronous", "stages"),
    "speed": ("engine", "slots", "speedups", "spot_check", "pad_batches"),
    "randomness": ("seed",),
}
_ASKED = re.compile(r"--(?P<block>\w+)(?:\.init_args)?\.(?P<option>\w+)\.help")


def help_for(words: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None if it asks for none, or the parser has to answer.

    Example:
        >>> help_for(["fit", "--help"]).splitlines()[0]
        'usage: fl-lightning fit --config NAME [OPTIONS]'
        >>> help_for(["fit", "--model", "my.Model", "--help"]) is None
        True
    """
    if not words or words[0] in ("--help", "-h"):
        return help_of_all()
    own = [*words[: words.index("--")]] if "--" in words else [*words]
    asks = any(word in ("--help", "-h") for word in own)
    if words[0] in OF_LIGHTNING and asks and len(words) == 2:
        return run_help(words[0])
    pages: Mapping[str, str] = contents()["pages"]
    if asks or own == ["network"]:
        found = next((page for page in (" ".join(own[:2]), own[0]) if page in pages), None)
        if found:
            return pages[found]
    if "--federation.help" in words:
        return block_help()
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        asked = _ASKED.fullmatch(word)
        if asked and following.startswith("--") and classes_of(asked["block"], asked["option"]):
            return classes_help(asked["block"], asked["option"])
    return None


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


def without_all(words: Sequence[str]) -> list[str]:
    """Replace ``--help all`` in a command line by the parser's own ``--help``.

    Example:
        >>> without_all(["fit", "--help", "all"])
        ['fit', '--help']
    """
    is_all = len(words) == 3 and [*words[1:]] == ["--help", "all"]
    return [*words[:-1]] if is_all else [*words]


def block_help() -> str:
    """Return the help of the federation block's options, in groups."""
    options = contents()["federation"]["options"]
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


def classes_help(block: str, option: str) -> str:
    """Return the help of an option that accepts classes: a line for each class.

    Example:
        >>> print(classes_help("federation", "asynchronous"))  # doctest: +ELLIPSIS
        federation.asynchronous takes one of
        <BLANKLINE>
          FedAsync  The server mixes each client's model into its own on arrival.
          FedBuff   The server steps whenever a buffer of updates is full.
        <BLANKLINE>
        ...
    """
    found = classes_of(block, option) or {}
    classes = {path.rpartition(".")[2]: line for path, line in found["classes"].items()}
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
            f"{block}.{option} takes one of",
            "",
            *lines,
            "",
            f"The options of one: --{block}.{option}.help {example}",
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


def command_of(words: Sequence[str]) -> str | None:
    """Return the first word that is a command; None if there is none.

    Example:
        >>> command_of(["--config", "quickstart", "fit"])
        'fit'
    """
    return next((word for word in words if word in COMMANDS), None)
