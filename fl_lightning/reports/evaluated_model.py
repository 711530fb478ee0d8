"""The table of results at the end of a command, which names the evaluated model.

``fit`` tests the last model, while the command ``test`` may evaluate the best one. Both have metrics of the same
names, so each table names the model's round and its checkpoint.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import Federation, begin_round, is_in_round, logged_in_round
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.log_file import detail
from fl_lightning.reports.progress import federation_of, number
from fl_lightning.reports.screen import table


class ModelOrigin:
    """Describes in words which model a Trainer evaluates: from which checkpoint, or after which round.

    Example:
        >>> trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        >>> ModelOrigin().words(trainer)
        'the model as it was given, without a round of this Trainer'
    """

    def __init__(self) -> None:
        self._words, self._steps = "", -1
        self._module: Any = None

    def note(
        self, trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]
    ) -> None:
        """Record which checkpoint was loaded into the module; does nothing during a fit."""
        if trainer.state.fn == "fit":
            return  # the fit changes the weights of the checkpoint
        self._words = f"the model {_after(checkpoint)}, {shown_path(str(trainer.ckpt_path))}"
        self._steps, self._module = trainer.global_step, weakref.ref(module)

    def words(self, trainer: Trainer) -> str:
        """Return words for the evaluated model, such as ``the model after round 7`` and its checkpoint's path."""
        module, steps = trainer.lightning_module, trainer.global_step
        # a fit in between would have changed the weights of the checkpoint
        if self._module is not None and self._module() is module and self._steps == steps:
            return self._words
        if not steps:
            return "the model as it was given, without a round of this Trainer"
        last = "" if is_in_round(trainer) else ", the last one of this fit"
        return f"the model after {_unit(federation_of(trainer) is not None)} {steps}{last}"


def saved_after(path: str) -> str:
    """Return when a checkpoint file was saved, in words such as ``after round 7``; empty if unreadable."""
    try:
        # memory-mapped, so that the weights of a large model are not read
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return _after(checkpoint)
    except (OSError, RuntimeError, UnpicklingError, KeyError):
        return ""


def shown_path(path: str) -> str:
    """Return a path relative to the working directory if it is inside, otherwise the absolute path."""
    absolute, here = Path(path).resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _after(checkpoint: Mapping[str, Any]) -> str:
    federated = Federation.__qualname__ in checkpoint.get("callbacks", {})
    return f"after {_unit(federated)} {checkpoint['global_step']}"


def _unit(federated: bool) -> str:
    return "round" if federated else "optimizer step"


# metrics of a round, not of the model
_OF_ROUNDS = re.compile(
    r"round/|secure/|privacy/|mask/|calibration/|lr-|epoch$|step$|.*_(step|epoch)$|train[/_]|search/"
)
_OVER_CLIENTS = re.compile(r"(clients/)?(?P<name>.+)_(?P<kind>mean|std|worst_decile|jain)")
_COLUMNS = ("mean", "std", "worst_decile")
_HEAD = ("model", "clients", "std", "worst 10 %")


class ResultsTable(Callback):
    """Prints a table of metrics after a fit, a validation and a test, and names the evaluated model.

    The log file names the model as well. ``predict`` prints its name only.

    Args:
        waits_for_test: whether a test follows the fit. The fit then prints no table, and the test's table
            has the metrics that `keep` has stored.
        is_wanted: whether to print the table.
    """

    def __init__(self, *, waits_for_test: bool = False, is_wanted: bool = True) -> None:
        super().__init__()
        self._waits, self._is_wanted = waits_for_test, is_wanted
        self._origin = ModelOrigin()
        self._kept: dict[str, Any] = {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Record the checkpoint that is evaluated."""
        self._origin.note(trainer, pl_module, checkpoint)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the start of a round, so that its metrics can be told from those of earlier rounds."""
        begin_round(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of metrics, unless a test follows the fit."""
        if not self._waits:
            self.report(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log which model the command ``validate`` evaluates."""
        if trainer.state.fn == "validate":
            rank_zero_info(f"validate: {self._origin.words(trainer)}", **detail())

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log which model is tested, by the command ``test`` or at the end of a fit."""
        rank_zero_info(f"test: {self._origin.words(trainer)}", **detail())

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print which model the command ``predict`` uses."""
        rank_zero_info(f"predict: {self._origin.words(trainer)}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of metrics after the command ``validate``."""
        if trainer.state.fn == "validate":
            self.report(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of metrics after a test: the command ``test``, or the test that follows a fit."""
        self.report(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Store the last round's metrics, which `report` adds to its next table."""
        self._kept = logged_in_round(trainer)

    def report(self, trainer: Trainer) -> None:
        """Print the table of metrics on standard output, and write it into the log file."""
        kept, self._kept = self._kept, {}
        results = results_table(kept | logged_in_round(trainer))
        if not results or not self._is_wanted or not trainer.is_global_zero:
            return
        heading = f"results of {self._origin.words(trainer)}"
        print(f"\n{in_lines(heading, sys.stdout)}\n\n{results}", flush=True)
        rank_zero_info(f"{heading}\n\n{results}", **detail())


def results_table(metrics: Mapping[str, Any]) -> str:
    """Return metrics as a text table with one row per metric; an empty text if there are none.

    Args:
        metrics: values by name, as the Trainer's ``callback_metrics``: ``val/accuracy`` of the global
            model, ``clients/val/accuracy_mean`` over clients, ``personal/…`` of personal models.

    Example:
        >>> metrics = {"test/accuracy": 0.96, "train_loss": 0.1, "clients/test/accuracy_mean": 0.95}
        >>> metrics |= {"clients/test/accuracy_std": 0.04, "personal/test/accuracy_mean": 0.97}
        >>> print(results_table(metrics))
                                model  clients    std  worst 10 %
        test/accuracy           0.960    0.950  0.040           -
        personal/test/accuracy      -    0.970      -           -
    """
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        found = _OVER_CLIENTS.fullmatch(name)
        if found and name.startswith(("clients/", "personal/")):
            rows.setdefault(found["name"], {})[found["kind"]] = float(value)
        elif not _OF_ROUNDS.match(name):
            rows.setdefault(name, {})["model"] = float(value)
    if not rows:
        return ""
    has_clients = any(kind in row for row in rows.values() for kind in _COLUMNS)
    kinds = ("model", *_COLUMNS) if has_clients else ("model",)
    order = sorted(rows, key=lambda name: (name.startswith("personal/"), name))
    lines = [
        [name, *(number(rows[name][kind]) if kind in rows[name] else "-" for kind in kinds)]
        for name in order
    ]
    return table(["", *_HEAD[: len(kinds)]], lines)
