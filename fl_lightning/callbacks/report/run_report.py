"""Every run's ``report.html``, its figures, and the lines of which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.callbacks.console.tidy import detail
from fl_lightning.callbacks.evaluated_model import shown_path
from fl_lightning.callbacks.report.board import lay_out, show_results
from fl_lightning.callbacks.report.history import IDS, NAME, History, RoundLine, append, begin
from fl_lightning.callbacks.report.run_page import write_report
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import Charts, Federation, keep_once, own_run_folder, run_folder

REPORT = "report.html"


class RunReport(Callback):
    """Keeps every round in ``rounds.jsonl``, and makes ``report.html`` and ``figures/`` of them.

    The page is one file that opens without a network, in light and dark. It has the curves, the clients'
    distributions, who took part, the partition, bytes, privacy, masks and seconds; each figure is also in
    ``figures/`` as PNG and SVG. It is made at the end of a fit and again after its test. Central runs have
    one as well, with epochs for rounds. A trainer without a logger keeps nothing. TensorBoard gets an order
    of charts (tab Custom Scalars), tables of the last round and of what is logged once, such as the test's
    numbers (Text), and the run's options (HPARAMS).

    Args:
        page: whether to make the page and its figures, a few seconds; the rounds are kept anyway.
        max_clients: of rounds with more clients than this the clients' own numbers are not kept.
        waits_for_test: whether a test follows the fit, or `finish`, and makes the page.

    Example:
        >>> from fl_lightning import Federation
        >>> callbacks = [Federation(), RunReport()]
    """

    def __init__(
        self, page: bool = True, max_clients: int = 1000, waits_for_test: bool = False
    ) -> None:
        super().__init__()
        if max_clients < 0:
            raise ConfigurationError(f"max_clients must not be negative, got {max_clients}")
        self.page, self.max_clients, self.waits_for_test = page, max_clients, waits_for_test
        self._folder: Path | None = None
        self._seen: dict[str, Any] = {}
        self._ahead: dict[str, Any] = {}
        self._noted: int | None = None  # the last round that is kept
        self._has_begun = False
        self._charts: Charts | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a place ahead of the federation, which logs a round when it ends.

        Raises:
            ConfigurationError: if it has such a place.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        federation = _federation(trainer)
        if federation is not None and callbacks.index(self) < callbacks.index(federation):
            raise ConfigurationError(
                "RunReport keeps what Federation has logged: give the Trainer callbacks=[Federation(…), "
                "RunReport()], in this order"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn where the run's folder is."""
        folder = run_folder(trainer)  # which processes agree on: all must ask
        keeps = trainer.is_global_zero and trainer.loggers and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = Path(folder) if keeps else None
        self._seen, self._noted, self._has_begun = {}, None, False
        self._ahead = dict(trainer.callback_metrics)  # which a sanity check forgets

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the epoch before of a central run: by now all of it has been logged."""
        if self._noted is None:  # only now Lightning has restored which one a resumed run is in
            self._noted = trainer.current_epoch
        self._note_central(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the round, before its checkpoint is saved."""
        if _federation(trainer) is not None:
            self._note(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the last epoch of a central run."""
        self._note_central(trainer, trainer.current_epoch)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the page, unless the test's numbers are still to come."""
        if not self.waits_for_test:
            self.finish(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep TensorBoard from making charts of what is logged once."""
        self._charts = Charts(trainer, held=".*").start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same where the run is a validation alone."""
        if trainer.state.fn == "validate" and not (Path(own_run_folder(trainer)) / NAME).exists():
            self._charts = Charts(trainer, held=".*").start()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the numbers of a validation alone."""
        self._keep_evaluation(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the test's numbers, and make the page again with them."""
        self._keep_evaluation(trainer)
        self.finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the loggers back, also after an evaluation that failed."""
        self._give_back()

    def _keep_evaluation(self, trainer: Trainer) -> None:
        if self._charts is not None:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            keep_once(trainer, "test" if trainer.state.fn == "test" else "validation", found)
            self._give_back()

    def _give_back(self) -> None:
        if self._charts is not None:
            self._charts.stop()
            self._charts = None

    def finish(self, trainer: Trainer) -> None:
        """Make the page of what is in the run's folder; all processes call it."""
        folder = Path(run_folder(trainer))
        if not self.page or not trainer.is_global_zero or not (folder / NAME).exists():
            return
        try:
            write_report(folder)
            show_results(trainer, folder, History.read(folder))
        except OSError as error:  # a full disk: the run itself is done
            rank_zero_warn(f"no {REPORT}: {error}")
            return
        told = detail() if self.waits_for_test else {}  # else the command tells of all files
        rank_zero_info(f"report: {shown_path(str(folder / REPORT))}", **told)

    def _note_central(self, trainer: Trainer, number: int) -> None:
        if self._noted is not None and number > self._noted and _federation(trainer) is None:
            self._note(trainer, number)

    def _note(self, trainer: Trainer, number: int) -> None:
        if self._folder is None:
            return
        if not self._has_begun:
            begin(self._folder, number - 1)
            lay_out(trainer, trainer.callback_metrics)
        self._noted, self._has_begun = number, True
        logged, self._ahead = self._ahead | trainer.callback_metrics, {}
        # what was logged in this round is another object than in the last one
        new = {name: v for name, v in logged.items() if self._seen.get(name) is not v}
        self._seen = dict(logged)
        metrics = {name: float(value) for name, value in new.items()}
        append(self._folder, RoundLine(number, metrics, self._clients(trainer)))

    def _clients(self, trainer: Trainer) -> dict[str, Sequence[float]]:
        """Return what clients of the round have shown of themselves."""
        federation = _federation(trainer)
        if federation is None or federation.rounds is None:
            return {}
        record = federation.rounds.record
        stages = federation.rounds.stages
        hides = stages.hides_clients or any(part.hides_cohorts for part in stages.around_fit)
        if hides or len(record.finished) > self.max_clients:
            return {}
        known = {name: record.means.by_client(name) for name in record.means.names}
        ids = sorted(record.finished)
        missing = float("nan")
        found: dict[str, Sequence[float]] = {IDS: ids}
        for name, values in known.items():
            found[name] = [values.get(client, missing) for client in ids]
        return found


def _federation(trainer: Trainer) -> Federation | None:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Federation)), None)
