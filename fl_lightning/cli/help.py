"""Help texts, at most 80 characters a line, printed without importing PyTorch.

They are ``--help`` of every command; ``--federation.help``, the options of the block in groups; and
``--federation.correction.help``, the classes that an option accepts. They are stored in ``help.json``, which
``python docs/command_help.py`` writes, because the parser takes seconds to import. The parser itself answers
``--federation.correction.help FedProx``, the options of one class, and ``fit --help all``, all options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_lightning.cli.names import contents

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


def help_for(words: Sequence[str]) -> str | None:
    """Return the stored help page that a command line asks for; None if it asks for none that is stored.

    Example:
        >>> help_for(["fit", "--help"]).splitlines()[0]
        'usage: fl-lightning fit --config NAME [OPTIONS]'
        >>> help_for(["fit", "--model", "my.Model", "--help"]) is None
        True
    """
    pages: Mapping[str, str] = contents()["pages"]
    if not words or words[0] in ("--help", "-h"):
        return pages[""]
    own = [*words[: words.index("--")]] if "--" in words else [*words]
    asks = own == ["network"] or any(word in ("--help", "-h") for word in own)
    if asks and (
        words[0] not in OF_LIGHTNING or len(words) == 2
    ):  # else the parser's help is complete: it has the options of the given classes as well
        return next((pages[page] for page in (" ".join(own[:2]), own[0]) if page in pages), None)
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        page = pages.get(word.replace(".init_args", ""))
        if page is not None and following.startswith("--") and word.startswith("--"):
            return page
    return None
