"""Which model metrics belong to, and the table of results at the end.

``fit`` ends with a test of the last model, while ``test`` may be given the best one: their metrics differ
and look alike, so each table names the round and the file of its model.
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

from fl_lightning.federation import Federation, begin_round, logged_in_round
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.log_file import detail
from fl_lightning.reports.progress import federation_of, number
from fl_lightning.reports.screen import table


class ModelOrigin:
    """Remembers which checkpoint a Trainer has loaded into its module for an evaluation.

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
        """Note the source of the module's weights from now on."""
        if trainer.state.fn == "fit":
            return  # which goes on from it
        self._words = f"the model {_after(checkpoint)}, {shown_path(str(trainer.ckpt_path))}"
        self._steps, self._module = trainer.global_step, weakref.ref(module)

    def words(self, trainer: Trainer) -> str:
        """Return in words which model the Trainer's module holds."""
        module, steps = trainer.lightning_module, trainer.global_step
        # a fit since then would have gone on from it
        if self._module is not None and self._module() is module and self._steps == steps:
            return self._words
        if not steps:
            return "the model as it was given, without a round of this Trainer"
        return f"the model after {_unit(federation_of(trainer) is not None)} {steps}, the last one of this fit"


def saved_after(path: str) -> str:
    """Return after which round a checkpoint was saved, as ``after round 7``; empty if unknown."""
    try:
        # mapped, not read: of a large model only what is looked at
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return _after(checkpoint)
    except (OSError, RuntimeError, UnpicklingError, KeyError):
        return ""


def shown_path(path: str) -> str:
    """Return a path from the working directory on if it is below it, else from the root on."""
    absolute, here = Path(path).resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _after(checkpoint: Mapping[str, Any]) -> str:
    federated = Federation.__qualname__ in checkpoint.get("callbacks", {})
    return f"after {_unit(federated)} {checkpoint['global_step']}"


def _unit(federated: bool) -> str:
    return "round" if federated else "optimizer step"


# of a round, not of the model
_OF_ROUNDS = re.compile(
    r"round/|secure/|privacy/|mask/|calibration/|lr-|epoch$|step$|.*_(step|epoch)$|train/|search/"
)
_OVER_CLIENTS = re.compile(r"(clients/)?(?P<name>.+)_(?P<kind>mean|std|worst_decile|jain)")
_COLUMNS = ("mean", "std", "worst_decile")
_HEAD = ("model", "clients", "std", "worst 10 %")


class ResultsTable(Callback):
    """Prints the metrics at the end of a fit, a validation and a test, and of which model they are.

    The log file has that model ahead of the figures as well; ``predict`` says it on the screen.

    Args:
        waits_for_test: whether a fit is followed by a test, whose table has the fit's metrics as well:
            give them to `keep`.
        is_wanted: whether to print at all.
    """

    def __init__(self, *, waits_for_test: bool = False, is_wanted: bool = True) -> None:
        super().__init__()
        self._waits, self._is_wanted = waits_for_test, is_wanted
        self._origin = ModelOrigin()
        self._kept: dict[str, Any] = {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the checkpoint that is evaluated."""
        self._origin.note(trainer, pl_module, checkpoint)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell this round's metrics from those of earlier models."""
        begin_round(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of metrics, unless a test follows the fit."""
        if not self._waits:
            self.report(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the model in the ``validate`` command; a fit's own validations stand beside their round."""
        if trainer.state.fn == "validate":
            rank_zero_info(f"validate: {self._origin.words(trainer)}", **detail())

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the model in the ``test`` command and in the test at the end of a fit."""
        rank_zero_info(f"test: {self._origin.words(trainer)}", **detail())

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the model in the ``predict`` command."""
        rank_zero_info(f"predict: {self._origin.words(trainer)}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print in the ``validate`` command."""
        if trainer.state.fn == "validate":
            self.report(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print in the ``test`` command and in the test at the end of a fit."""
        self.report(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Keep the present metrics for the next table."""
        self._kept = logged_in_round(trainer)

    def report(self, trainer: Trainer) -> None:
        """Print the table, on standard output and into the log file."""
        results = results_table(self._kept | logged_in_round(trainer))
        if not results or not self._is_wanted or not trainer.is_global_zero:
            return
        heading = f"results of {self._origin.words(trainer)}"
        print(f"\n{in_lines(heading, sys.stdout)}\n\n{results}", flush=True)
        rank_zero_info(f"{heading}\n\n{results}", **detail())


def results_table(metrics: Mapping[str, Any]) -> str:
    """Return a table of metrics, a row each; empty if there is none.

    Args:
        metrics: by name, as the Trainer's ``callback_metrics``: ``val/accuracy`` of the model,
            ``clients/val/accuracy_mean`` and its like over clients, ``personal/…`` of their own models.

    Example:
        >>> metrics = {"test/accuracy": 0.96, "train/loss": 0.1, "clients/test/accuracy_mean": 0.95}
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
