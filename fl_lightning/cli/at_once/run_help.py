"""``fit --help`` and its like: a screen of the options that people use; all of them by ``fit --help all``.

The parser, which knows all, takes seconds to import.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fl_lightning.cli.at_once.commands import OF_LIGHTNING

# ours, as the parser has them
OPTIONS = {
    "federation": "Train over many clients. Without this block training is central.",
    "test_after_fit": "Test the last model when fit ends, if the data module has a test set.",
    "report": "Make report.html and figures/ in the run's folder when fit ends, a few seconds.",
    "num_threads": "Threads of a CPU computation; PyTorch chooses if null. Small models gain nothing from "
    "several, and lose much where other programs run as well.",
    "resume_changed": "With ckpt_path: resume although the configuration is not that of the run.",
    "log_level": "run.log, in the run's folder, keeps messages of this level and above: debug, info, warning or "
    "error.",
}
_WHAT = {
    "--config NAME": "A configuration in the box (fl-lightning configs) or a file. Several are layered, later "
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
    "--resume_changed BOOL": OPTIONS["resume_changed"],
    "--num_threads N": OPTIONS["num_threads"],
    "--log_level LEVEL": OPTIONS["log_level"],
}
_OTHERS = {
    "--ckpt_path PATH": "The checkpoint whose model is meant; last is that of the newest run of this "
    "configuration.",
    "--num_threads N": OPTIONS["num_threads"],
    "--log_level LEVEL": OPTIONS["log_level"],
}
_SEED = {"--seed_everything N": "Seed of all draws, 0 if not given."}


def asked_for_run(words: Sequence[str]) -> str | None:
    """Return the command whose help is asked for and nothing else, None for other command lines.

    Example:
        >>> asked_for_run(["fit", "--help"])
        'fit'
        >>> asked_for_run(["fit", "--model", "my.Model", "--help"]) is None
        True
    """
    is_asked = len(words) == 2 and words[0] in OF_LIGHTNING and words[1] in ("--help", "-h")
    return words[0] if is_asked else None


def without_all(words: Sequence[str]) -> list[str]:
    """Return a command line for the parser, to which ``--help all`` is ``--help``.

    Example:
        >>> without_all(["fit", "--help", "all"])
        ['fit', '--help']
    """
    is_all = len(words) == 3 and [*words[1:]] == ["--help", "all"]
    return [*words[:-1]] if is_all else [*words]


def run_help(command: str) -> str:
    """Return the options of a command that people use, at most 80 characters a line.

    Example:
        >>> max(len(line) for line in run_help("fit").splitlines()) <= 80
        True
    """
    of_this_run = (_FIT if command == "fit" else _OTHERS) | _SEED
    return "\n".join(
        [
            f"usage: fl-lightning {command} --config NAME [OPTIONS]",
            "",
            OF_LIGHTNING[command],
            "",
            "what is run:",
            *_lines(_WHAT),
            "",
            "this run:",
            *_lines(of_this_run),
            "",
            f"All options, those of the Trainer among them: fl-lightning {command} --help all",
        ]
    )


def _lines(options: dict[str, str]) -> Iterator[str]:
    for name, text in options.items():
        first, *more = textwrap.wrap(text, 50)
        yield f"  {name.ljust(26)}{first}"
        yield from (f"  {'':26}{line}" for line in more)
