"""What went wrong on the command line, in a sentence.

A setting that cannot work may be found by the parser (a misspelt key, an unknown class), by a class
that refuses its arguments while the parser builds it, or by the run at its start. Each ends with
one sentence on standard error and a code other than 0, without a traceback.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import re
import sys
from importlib import import_module
from pickle import UnpicklingError
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from fl_lightning.core.errors import (
    CheckpointFailure,
    ConfigurationError,
    ProcessFailure,
    RoundFailure,
)

# What the parser says besides the reason: the types it tried and the values it was given.
_NOISE = re.compile(
    r"^[\s-]*(Does not validate against any of|Subtypes: |Errors:$|Given value|Expected a <class 'N)"
)
_REFUSED_OPTION = re.compile(r"'(?P<option>\w+)' is not accepted")
_TOLD_IN_A_SENTENCE = (
    CheckpointFailure,
    ConfigurationError,
    MisconfigurationException,
    RoundFailure,
    ProcessFailure,
)
# a full disk, a folder that is read-only or no folder at all
_STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST),
)
# "Invalid learning rate: -0.1", as every optimizer of PyTorch says it
_REFUSED_BY_OPTIMIZER = re.compile(r"Invalid [\w ]+: ")
_CLASS_PATH = re.compile(r"class_path '([\w.]+)'")


class Parser(LightningArgumentParser):
    """Lightning's parser with errors that fit on a screen."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and end with code 2."""
        if not self.exit_on_error:  # a parser inside the parser, trying one of several types
            super().error(message, ex)
        print(f"fl-lightning: {shorten(message)}", file=sys.stderr)
        sys.exit(2)


def shorten(message: str) -> str:
    """Return a parser's message in one line, with a suggestion where a name is misspelt.

    Example:
        >>> lines = ["Errors:", "  - Option 'x' is not accepted", "  - Expected a <class 'NoneType'>"]
        >>> shorten(chr(10).join(lines))
        "Option 'x' is not accepted. See --help for what there is."
    """
    lines = [line.strip(" -") for line in message.splitlines() if not _NOISE.match(line)]
    sentence = re.sub(r"\s+", " ", " ".join(lines)).strip(" .")
    return f"{sentence}. {_suggestion(message)}".strip()


def _suggestion(message: str) -> str:
    found = _REFUSED_OPTION.search(message)
    owners = _CLASS_PATH.findall(message[: found.start()]) if found else []
    if found is None or not owners:
        return "See --help for what there is."
    module, _, name = owners[-1].rpartition(".")
    options = list(inspect.signature(getattr(import_module(module), name)).parameters)
    close = difflib.get_close_matches(found["option"], options, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"It accepts {', '.join(options)}."


def explain(error: BaseException) -> str | None:
    """Return a sentence for a mistake in the settings, None for any other error.

    Example:
        >>> explain(ConfigurationError("fraction must be in (0, 1], got 1.5"))
        'fraction must be in (0, 1], got 1.5'
        >>> explain(KeyError("a bug")) is None
        True
    """
    cause: BaseException | None = error
    while cause is not None:  # the parser wraps what a class raises while it is built
        if isinstance(cause, _TOLD_IN_A_SENTENCE):
            return str(cause)
        cause = cause.__cause__
    text = str(error)
    if isinstance(error, ValueError) and _REFUSED_BY_OPTIMIZER.match(text):
        return f"the optimizer refuses one of its options: {text}"
    if isinstance(error, ValueError) and "`val_check_interval`" in text:
        return f"trainer.val_check_interval: {' '.join(text.split())}"
    if isinstance(error, FileNotFoundError) and "heckpoint" in text:
        return f"ckpt_path: {text} Give the path of a .ckpt file, or last."
    if isinstance(error, UnpicklingError):
        return "ckpt_path: the file is no checkpoint of Lightning, or a damaged one"
    if text.startswith("Early stopping conditioned on metric"):
        return text
    return _not_written(error) or _foreign_checkpoint(error)


def _not_written(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in _STORAGE:
        return None
    return f"{error.filename or 'a file of the run'} could not be written: {error.strerror}"


def _foreign_checkpoint(error: BaseException) -> str | None:
    first, *details = str(error).splitlines() or [""]
    if not first.startswith("Error(s) in loading state_dict"):
        return None
    shown = " ".join(detail.strip() for detail in details)
    return (
        "the checkpoint belongs to another model: resume with the model that wrote it, or start "
        f"without ckpt_path. {shown[:200]}{'…' if len(shown) > 200 else ''}"
    )
