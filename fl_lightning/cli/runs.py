"""Output and files of a command, and resuming of an interrupted run.

Log messages are printed in two columns, a warning is one sentence, and deprecation warnings of other libraries
are hidden. Messages logged before the log file is open are kept, and written into it later.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import (
    CONFIG,
    AtomicCheckpointIO,
    newest_checkpoint,
    own_run_folder,
    run_folder,
)
from fl_lightning.reports.evaluated_model import saved_after, shown_path
from fl_lightning.reports.layout import is_terminal, laid_out, width_of
from fl_lightning.reports.log_file import LOGGERS, NAME, EarlyMessages, tidy_screen, with_place
from fl_lightning.reports.run_report import REPORT, RunReport


class RunConfig(SaveConfigCallback):
    """Saves the configuration as ``config.yaml`` in the run's folder, with any logger."""

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        path = Path(own_run_folder(trainer), CONFIG)
        if stage != "fit" and path.exists():
            return  # the file has the configuration of the fit whose model is evaluated
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(self.parser.dump(self.config, skip_none=False, skip_validation=True))
        os.replace(unfinished, path)


def write_atomically(trainer: Trainer) -> None:
    """Make central fits write checkpoints atomically, so that a killed process leaves no incomplete file."""
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return  # other strategies write checkpoints in their own way
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def how_to_resume(folders: Iterable[Path]) -> str:
    """Return a sentence that names an interrupted fit's last checkpoint and tells how to resume from it."""
    newest = next(filter(None, map(newest_checkpoint, folders)), None)
    if newest is None:
        return "before the first checkpoint: start again with the same command"
    path = shown_path(str(newest))
    return (
        f"{saved_after(path)}, which is saved: resume with the same command and --ckpt_path {path}"
    )


def saved_models(trainer: Trainer) -> dict[str, str]:
    """Return descriptions of a fit's checkpoints, by path: first the last checkpoint, then the best."""
    last: dict[str, str] = {}
    best: dict[str, str] = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        path, score = callback.best_model_path, callback.best_model_score
        if path and callback.monitor and score is not None:
            words = [f"best {callback.monitor}, {float(score):.4f}", saved_after(path)]
            best[path] = ", ".join(filter(None, words))
        for path in (callback.best_model_path, callback.last_model_path):
            if path and path not in best:
                last[path] = saved_after(path)
    return last | best


# commands, with the methods of the module and of the data module that they call
_EVALUATIONS = (
    ("validate", "validation_step", "val_dataloader"),
    ("test", "test_step", "test_dataloader"),
    ("predict", None, "predict_dataloader"),
)


def _evaluation(module: LightningModule, data: LightningDataModule | None) -> str | None:
    """Return the first command of validate, test and predict whose methods the module and the data define."""
    if isinstance(data, FederatedDataModule) and data.evaluated_by is not None:
        data = data.source  # no command can read examples of remote clients
    return next(
        (
            command
            for command, step, loader in _EVALUATIONS
            if any(is_overridden(loader, one) for one in (module, data))
            and (step is None or is_overridden(step, module))
        ),
        None,
    )


def report_whereabouts(trainer: Trainer, data: LightningDataModule | None) -> None:
    """Print the paths of checkpoints, logs and report, and the next command.

    Args:
        trainer: Trainer of the fit.
        data: the fit's data module; after a fit in child processes, the Trainer has none.
    """
    folder = run_folder(trainer)  # a collective call: every process has to make it
    if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return
    lines = []
    reports = [each for each in trainer.callbacks if isinstance(each, RunReport)]  # type: ignore[attr-defined]
    if any(each.page for each in reports) and Path(folder, REPORT).exists():
        lines.append(f"report:     {shown_path(str(Path(folder, REPORT)))}")
    models = saved_models(trainer)
    for path, words in models.items():
        lines.append(f"checkpoint: {shown_path(path)}{f' ({words})' if words else ''}")
    if trainer.logger is not None:
        lines.append(f"logs:       {shown_path(folder)}")
    if Path(folder, NAME).exists():
        lines.append(f"messages:   {shown_path(str(Path(folder, NAME)))}")
    if isinstance(trainer.logger, TensorBoardLogger):
        lines.append(
            f"look:       tensorboard --logdir {shown_path(trainer.logger.save_dir or '')}"
        )
    configuration = Path(own_run_folder(trainer), CONFIG)
    command = _evaluation(trainer.lightning_module, data)
    if configuration.exists() and models and command:
        where = f"--config {shown_path(str(configuration))} --ckpt_path {shown_path([*models][-1])}"
        lines.append(f"next:       fl-lightning {command} {where}")
    print("\n".join(["", *map(in_columns, lines)]))


def in_columns(line: str) -> str:
    """Format a line ``label: text`` in two columns for a terminal; outside of a terminal, return it unchanged.

    A command stays one line, which can be pasted into a shell.
    """
    if not is_terminal(sys.stdout):
        return line
    label, _, text = line.partition(":")
    width = sys.maxsize if label in ("look", "next") else width_of(sys.stdout) - 1
    return laid_out(f"{label}: {text.strip()}", width)


_EXPECTED_WARNINGS = (
    # data sets of this package build whole batches in the main process, which workers would slow down
    ".*does not have many workers",
    # a resumed run logs in its own folder, `validate` and `test` log in a new one
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed",
    # compare reads every variant's configuration with this command line
    "LightningCLI's args parameter is intended to run from within Python",
)
# libraries whose deprecation warnings are meant for programmers, not for users
_OTHERS = (
    r"(lightning|lightning_utilities|torch|torchvision|torchmetrics|timm|jsonargparse|tensorboard|"
    r"numpy|scipy|sklearn|matplotlib|google|tqdm|datasets|transformers|peft)(\.|$)"
)


@contextmanager
def console() -> Iterator[None]:
    """While a command runs (a context manager), format its messages and warnings, and keep early ones for the log file."""
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


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if is_terminal(sys.stderr):
        return f"{laid_out(f'warning: {message}', width_of(sys.stderr) - 1)}\n"
    said = with_place(message, category, filename, lineno)
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    return f"{now} | WARNING | {said}\n"
