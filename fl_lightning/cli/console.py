"""The screen of a command: messages laid out, warnings in a sentence, and none of other libraries' own.

Until a run has its log file, messages wait to be written into it.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from fl_lightning.callbacks.console.log_file import EarlyMessages
from fl_lightning.callbacks.console.tidy import LOGGERS, tidy_screen
from fl_lightning.core.console.layout import is_terminal, laid_out, width_of

_EXPECTED_WARNINGS = (
    # the data sets here build whole batches in the main process: workers would only slow them
    ".*does not have many workers",
    # a resumed run goes on in its own folder, `validate` and `test` log in a new one
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed",
    # compare reads every variant's configuration with this command line
    "LightningCLI's args parameter is intended to run from within Python",
)
# who tells its own programmers what will change, which is nothing that a user could mend
_OTHERS = (
    r"(lightning|lightning_utilities|torch|torchvision|torchmetrics|timm|jsonargparse|tensorboard|"
    r"numpy|scipy|sklearn|matplotlib|google|tqdm|datasets|transformers|peft)(\.|$)"
)


@contextmanager
def console() -> Iterator[None]:
    """Have messages and warnings of a command look alike, and keep the first ones for the log file."""
    for expected in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=expected)
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_OTHERS)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    untidy, early, formatwarning = tidy_screen(), EarlyMessages(), warnings.formatwarning
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        if logger.name == "root" or not logger.propagate:
            logger.addHandler(early)
    warnings.formatwarning = _warning
    try:
        yield
    finally:
        untidy()
        for logger in loggers:
            logger.removeHandler(early)
        warnings.formatwarning = formatwarning


def forget_early_messages() -> None:
    """Have messages so far be written into no further file: a process of this one has done it."""
    EarlyMessages.taken_from(LOGGERS)


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if is_terminal(sys.stderr):
        return f"{laid_out(f'warning: {message}', width_of(sys.stderr) - 1)}\n"
    where = f"{category.__name__}, {os.path.relpath(filename)}:{lineno}"
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    return f"{now} | WARNING | {message} ({where})\n"
