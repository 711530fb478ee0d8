"""Entry point of the command line, which answers without importing PyTorch where possible.

Help, the version, lists of configurations and classes, and errors such as a missing file or a misspelt option
take a fraction of a second. Names of packaged configurations become paths here, and short class names become
import paths; then `fl_lightning.cli.commands` runs the command.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fl_lightning.cli import configs, init
from fl_lightning.cli.help import COMMANDS, OF_LIGHTNING, help_for
from fl_lightning.cli.names import check_classes, contents, whole
from fl_lightning.cli.yaml_files import check_word, files_of
from fl_lightning.core.errors import ConfigurationError, close_to
from fl_lightning.core.yaml_files import read
from fl_lightning.reports.layout import in_lines

_OF_EXPERIMENTS = ("variants", "base")
_OF_RUNS = ("model", "data", "trainer")
_OPTION = re.compile(r"--federation\.(?!init_args|help)(?P<name>\w+).*")


def main(args: Any = None) -> None:
    """Run the command line; if the user can correct an error, print one sentence about it and exit.

    Args:
        args: words of the command line; those of the process if None. A mapping of options is passed on to
            Lightning's command line.
    """
    words = sys.argv[1:] if args is None else args
    if not isinstance(words, list):
        _run(words)
        return
    if os.getcwd() not in sys.path:  # the user's modules, as `python -m` finds them
        sys.path.append(os.getcwd())
    try:
        said = _answer(words)
        if said is None:
            is_all = words[1:] == ["--help", "all"]  # the parser's own help has all options
            words = whole(configs.with_paths(words[:-1] if is_all else words))
            check_command(words)
    except ConfigurationError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    if said is not None:
        _say(said)
        return
    _run(words)


def _answer(words: Sequence[str]) -> str | None:
    """Return the output of a command that does not need PyTorch; None for other commands."""
    if words and words[0] == "--version":
        from fl_lightning import __version__

        return f"fl-lightning {__version__}"
    if words and words[0] not in ("--help", "-h") and not any(word in COMMANDS for word in words):
        _refuse_command(words[0])
    if words and words[0] == "configs":
        return configs.run(words[1:])
    if words and words[0] == "init":
        return init.run(words[1:])
    return help_for(whole(words))


def _refuse_command(word: str) -> NoReturn:
    if word.startswith("-"):
        raise ConfigurationError(f"the first word must be a command, one of {', '.join(COMMANDS)}")
    raise ConfigurationError(f"there is no command {word!r}. {close_to(word, COMMANDS)}")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `fl-lightning configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(sentence: str) -> NoReturn:
    print(in_lines(f"fl-lightning: {sentence}", sys.stderr), file=sys.stderr)
    sys.exit(2)


def _run(words: Any) -> None:
    try:
        from fl_lightning.cli.commands import run_command
    except KeyboardInterrupt:  # it takes seconds
        sys.exit(130)
    run_command(words)


def check_command(words: Sequence[str]) -> None:
    """Raise ConfigurationError for mistakes in a command line that can be found without the slow parser."""
    if [*words] in [[name] for name in OF_LIGHTNING]:
        raise ConfigurationError(
            f"{words[0]} needs a configuration: try --config quickstart; fl-lightning configs lists all that "
            "the package has"
        )
    _check_options(words)
    contents_of = []
    for option, path in files_of(words):
        content = read(path)
        contents_of.append(content)
        keys = [*content] if isinstance(content, dict) else []
        if option in ("--search", "-s"):
            _check_search(path, keys)
        else:
            _check_kind(words[0], path, keys)
    check_classes(words, contents_of)


def _check_options(words: Sequence[str]) -> None:
    for word in words:
        check_word(word)
    known = contents()["federation"]["options"]
    for match in filter(None, map(_OPTION.fullmatch, words)):
        if match["name"] not in known:
            name = match["name"]
            raise ConfigurationError(
                f"federation.{name}: {name!r} is not accepted by Federation. {close_to(name, known)}"
            )


def _check_search(path: Path, keys: Sequence[Any]) -> None:
    if "space" not in keys and any(key in keys for key in _OF_RUNS):
        raise ConfigurationError(
            f"{path} has no space, which names the options to search and their values. For an example: "
            "fl-lightning configs copy sweeps/quickstart"
        )


def _check_kind(command: str, path: Path, keys: Sequence[Any]) -> None:
    """Raise ConfigurationError if a file belongs to another command, e.g. an experiment given to ``fit``."""
    if "space" in keys:
        raise ConfigurationError(
            f"{path} describes a search: use fl-lightning sweep --search {path}"
        )
    is_experiment = any(key in keys for key in _OF_EXPERIMENTS)
    if command == "compare" and not is_experiment and any(key in keys for key in _OF_RUNS):
        raise ConfigurationError(
            f"{path} describes one run, but compare needs an experiment with variants: use "
            f"fl-lightning fit --config {path}"
        )
    if command != "compare" and is_experiment:
        raise ConfigurationError(
            f"{path} describes an experiment, but {command} needs one run: use fl-lightning compare "
            f"--config {path}"
        )


if __name__ == "__main__":
    main()
