"""The commands, a line each; help that needs neither PyTorch nor Lightning."""

from __future__ import annotations

from collections.abc import Sequence

OF_LIGHTNING = {
    "fit": "Train: over many clients with a federation block, centrally without.",
    "validate": "Metrics of a model on the validation set, and every client's.",
    "test": "Metrics of a model on the test set.",
    "predict": "What a model predicts for the data module's examples.",
}
OURS = {
    "init": "Make a project to start from: a module, data, a YAML, a test.",
    "configs": "List the configurations in the box, or copy one.",
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
  fl-lightning configs                            what else there is
  fl-lightning fit --federation.help              the options of the block
  fl-lightning fit --federation.aggregator.help   what one of them takes
  fl-lightning init my_project                    your own module and data"""


def help_of_all() -> str:
    """Return what ``fl-lightning --help`` shows, at most 80 characters a line.

    Example:
        >>> max(len(line) for line in help_of_all().splitlines()) <= 80
        True
    """
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fl-lightning COMMAND [OPTIONS]",
            "",
            "Federated learning for PyTorch Lightning.",
            "",
            "commands:",
            *lines,
            "",
            _FIRST,
            "",
            "fl-lightning COMMAND --help shows a command's options, --version the version.",
        ]
    )


def command_of(words: Sequence[str]) -> str | None:
    """Return the first word that is a command; None if there is none.

    Example:
        >>> command_of(["--config", "quickstart", "fit"])
        'fit'
    """
    return next((word for word in words if word in COMMANDS), None)
