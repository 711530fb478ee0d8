"""The door of the command line: what needs no PyTorch is said before it is imported.

Help, the version, the configurations in the box, what an option takes and mistyped paths take a fraction
of a second. A configuration's name becomes a path here, and a class's short name its whole one; then
`fl_lightning.cli.command` runs the command.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fl_lightning.cli import projects
from fl_lightning.cli.at_once import configs
from fl_lightning.cli.at_once.block_help import asked_for_block, block_help
from fl_lightning.cli.at_once.catalogue import asked_for, catalogue
from fl_lightning.cli.at_once.commands import COMMANDS, command_of, help_of_all
from fl_lightning.cli.at_once.run_help import asked_for_run, run_help, without_all
from fl_lightning.cli.at_once.short_names import with_whole_names
from fl_lightning.cli.at_once.wrong_command import check_command
from fl_lightning.core.console.layout import in_lines
from fl_lightning.core.errors import ConfigurationError


def main(args: Any = None) -> None:
    """Run the command line; a setting that cannot work ends it with one sentence.

    Args:
        args: words of the command line, those of the process if None; or what else Lightning's command
            line takes as its arguments.
    """
    words = sys.argv[1:] if args is None else args
    if not isinstance(words, list):
        _go_on(words)
        return
    if os.getcwd() not in sys.path:  # modules of one's own, as `python -m` finds them
        sys.path.append(os.getcwd())
    try:
        said = _at_once(words)
        if said is None:
            words = with_whole_names(configs.with_paths(without_all(words)))
            check_command(words)
    except ConfigurationError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    if said is not None:
        _say(said)
        return
    _go_on(words)


def _at_once(words: Sequence[str]) -> str | None:
    """Return the answer to a command line that needs no PyTorch; None to others."""
    if not words or words[0] in ("--help", "-h"):
        return help_of_all()
    if words[0] == "--version":
        from fl_lightning import __version__

        return f"fl-lightning {__version__}"
    command = command_of(words)
    if command is None:
        _refuse_command(words[0])
    if words[0] == "configs":
        return configs.run(words[1:])
    if words[0] == "init":
        return projects.run(words[1:])
    if run := asked_for_run(words):
        return run_help(run)
    if block := asked_for_block(words):
        return block_help(block)
    asked = asked_for(with_whole_names(words))
    return catalogue(*asked) if asked else None


def _refuse_command(word: str) -> NoReturn:
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    if word.startswith("-"):
        raise ConfigurationError(f"a command is missing: one of {', '.join(COMMANDS)}")
    hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(COMMANDS)}."
    raise ConfigurationError(f"{word!r} is no command. {hint}")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `fl-lightning configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(sentence: str) -> NoReturn:
    print(in_lines(f"fl-lightning: {sentence}", sys.stderr), file=sys.stderr)
    sys.exit(2)


def _go_on(words: Any) -> None:
    try:
        from fl_lightning.cli.command import run_command
    except KeyboardInterrupt:  # it takes seconds
        sys.exit(130)
    run_command(words)


if __name__ == "__main__":
    main()
