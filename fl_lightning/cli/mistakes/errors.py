"""What went wrong on the command line, in a sentence.

A setting that cannot work may be found by the parser (a misspelt key, an unknown class), by a class
that refuses its arguments while the parser builds it, or by the run at its start. Each ends with
one sentence on standard error and a code other than 0, without a traceback.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pickle import UnpicklingError
from typing import Any, NoReturn

from jsonargparse import add_instantiator
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from fl_lightning.cli.mistakes.constructors import (
    Noting,
    NotingWithLinks,
    Refusal,
    Watch,
    causes,
    told_at,
)
from fl_lightning.cli.mistakes.words import sentence, shortened
from fl_lightning.core.console.layout import in_lines
from fl_lightning.core.errors import (
    CheckpointFailure,
    ClientFailure,
    ConfigurationError,
    ProcessFailure,
    RoundFailure,
)
from fl_lightning.federation import ProcessTraceback

_TOLD_IN_A_SENTENCE = (
    CheckpointFailure,
    ClientFailure,
    ConfigurationError,
    MisconfigurationException,
    RoundFailure,
    ProcessFailure,
)
# what constructors raise over an option; anything else is a bug, which needs its traceback
_OF_CONSTRUCTORS = (ValueError, TypeError, ImportError, MisconfigurationException, AssertionError)
_OF_OURS = (ValueError, ImportError, MisconfigurationException)
# a full disk, a folder that is read-only or no folder at all
_STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST),
)
# "Invalid learning rate: -0.1", as every optimizer of PyTorch says it
_REFUSED_BY_OPTIMIZER = re.compile(r"Invalid [\w ]+: ")

# what Lightning builds itself has a builder of its own, see Parser.add_instantiator
add_instantiator(Noting(), object)  # type: ignore[arg-type]


class Parser(LightningArgumentParser):
    """Lightning's parser with errors that fit on a screen."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and end with code 2."""
        if not self.exit_on_error:  # a parser inside the parser, trying one of several types
            super().error(message, ex)
        told = f"fl-lightning: {sentence(message, self._options())}"
        print(in_lines(told, sys.stderr), file=sys.stderr)
        sys.exit(2)

    @override
    def _load_config_parser_mode(self, content: str, path: Any = "", *args: Any, **kw: Any) -> Any:
        """Name the file that is no YAML, or holds no options."""
        try:
            return super()._load_config_parser_mode(content, path, *args, **kw)
        except TypeError as error:
            kind, _, said = str(error).partition(":")
            if kind == "Unexpected config":
                told = "it holds no options, which are written as name: value"
            elif kind == "Problems parsing config":
                told = "it is no YAML:" + said.replace('in "<unicode string>", line', "at line")
            else:
                raise
            raise TypeError(f"{path or 'config'}: {told}") from error

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        """Have Lightning's way to build models and data modules note refusals."""
        super().add_instantiator(NotingWithLinks(instantiator), *args, **kwargs)

    def check_environment(self, environ: Mapping[str, str]) -> None:
        """Refuse variables that stand for an option inside a class: the parser reads whole classes only."""
        dests = [action.dest for action in self._actions]
        known = {f"{self.env_prefix}_{dest}".upper().replace(".", "__"): dest for dest in dests}
        for name in sorted(environ.keys() - known):
            owner = next((each for each in known if name.startswith(f"{each}__")), None)
            if owner is not None:
                value = environ[name]
                for option in reversed(name.removeprefix(f"{owner}__").lower().split("__")):
                    value = f"{{{option}: {value}}}"
                raise ConfigurationError(
                    f"{name} is not read: {known[owner]} has no variable of this name. If it is a class, "
                    f"give all its options in one: {owner}='{value}'"
                )

    def _options(self) -> Sequence[str]:
        """Return the names of all options, of subcommands as well."""
        parsers = [
            self,
            *(self._subcommands_action.choices.values() if self._subcommands_action else ()),
        ]
        found = (name for parser in parsers for name in parser._option_string_actions)
        return sorted({name.lstrip("-") for name in found})


def explain(error: BaseException, watch: Watch | None = None) -> str | None:
    """Return a sentence for a mistake in the settings, None for any other error.

    Args:
        error: what ended the command.
        watch: knows which constructors refused their options, and where they stand.

    Example:
        >>> explain(ConfigurationError("fraction must be in (0, 1], got 1.5"))
        'fraction must be in (0, 1], got 1.5'
        >>> explain(KeyError("a bug")) is None
        True
    """
    refusal = watch.of(error) if watch is not None else None
    if watch is not None and refusal is not None:
        return _of_constructor(refusal, watch)
    for cause in causes(error):  # the parser wraps what a class raises while it is built
        if isinstance(cause, _TOLD_IN_A_SENTENCE):
            return str(cause)
    return _by_text(error) or _not_written(error) or _foreign_checkpoint(error)


def bug_behind(error: BaseException) -> str:
    """Return the traceback of what a module raised on a client's examples; empty for all else."""
    failure = next((cause for cause in causes(error) if isinstance(cause, ClientFailure)), None)
    cause = None if failure is None else failure.__cause__
    if isinstance(cause, ProcessTraceback):
        return cause.args[1] or ""
    return "" if cause is None else "".join(traceback.format_exception(cause))


def _by_text(error: BaseException) -> str | None:
    """Return a sentence for what others raise as a `ValueError` and the like."""
    text = str(error)
    if isinstance(error, ValueError) and _REFUSED_BY_OPTIMIZER.match(text):
        return _of_optimizer(text)
    if isinstance(error, ValueError) and "`val_check_interval`" in text:
        return f"trainer.val_check_interval: {' '.join(text.split())}"
    if isinstance(error, FileNotFoundError) and "heckpoint" in text:
        return f"ckpt_path: {text} Give the path of a .ckpt file, or last."
    if isinstance(error, UnpicklingError):
        return "ckpt_path: the file is no checkpoint of Lightning, or a damaged one"
    if text.startswith("Early stopping conditioned on metric"):
        return text
    return None


def _not_written(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in _STORAGE:
        return None
    return f"{error.filename or 'a file of the run'} could not be written: {error.strerror}"


def _of_constructor(refusal: Refusal, watch: Watch) -> str | None:
    """Return what a class says against its options, and where they stand in the YAML."""
    text = None
    for cause in causes(refusal.error):
        if isinstance(cause, _TOLD_IN_A_SENTENCE):
            text = str(cause)
            break
    if text is None:
        is_ours = refusal.kind.__module__.startswith("fl_lightning")
        if not isinstance(refusal.error, _OF_OURS if is_ours else _OF_CONSTRUCTORS):
            return None
        text = str(refusal.error)
        if _REFUSED_BY_OPTIMIZER.match(text):
            text = _of_optimizer(text)
        elif not isinstance(refusal.error, ImportError):
            text = f"{refusal.kind.__name__} refuses its options: {text}"
    return shortened(told_at(watch.place(refusal), refusal, text))


def _of_optimizer(text: str) -> str:
    return f"the optimizer refuses one of its options: {text}"


def _foreign_checkpoint(error: BaseException) -> str | None:
    first, *details = str(error).splitlines() or [""]
    if not first.startswith("Error(s) in loading state_dict"):
        return None
    shown = " ".join(detail.strip() for detail in details)
    return (
        "the checkpoint belongs to another model: resume with the model that wrote it, or start "
        f"without ckpt_path. {shown[:200]}{'…' if len(shown) > 200 else ''}"
    )
