"""The callback that records every round and writes ``report.html``, and the command ``report``."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.processes import write_whole
from fl_lightning.federation import (
    CONFIG,
    is_of_test,
    keep_once,
    logged_once,
    own_run_folder,
    run_folder,
)
from fl_lightning.models.causal_lm import ANSWERS
from fl_lightning.reports.charts import file_name
from fl_lightning.reports.evaluated_model import shown_path
from fl_lightning.reports.history import IDS, NAME, History, RoundLine, append, begin
from fl_lightning.reports.layout import duration
from fl_lightning.reports.log_file import detail
from fl_lightning.reports.loggers import hold_constants, lay_out, log_clients, show_results
from fl_lightning.reports.overview import provenance, why_it_stopped
from fl_lightning.reports.page import FRAGMENTS, Page
from fl_lightning.reports.progress import federation_of, progress_bar
from fl_lightning.reports.run_charts import evaluated_clients, in_bytes, read_table, run_sections

REPORT, FIGURES, PROVENANCE = "report.html", "figures", "provenance.json"
_RESUMED = ", resumed "
_MAY_CHANGE = {"date", "commit", "versions"}  # when a run is resumed


class RunReport(Callback):
    """Records each round's metrics in ``rounds.jsonl``, and writes a report: ``report.html``, ``figures/``.

    The page is one file without external resources, with a light and a dark theme. It shows curves,
    distributions over clients, participation, the partition, bytes, privacy, masks and seconds; each figure
    is also in ``figures/`` as PNG and SVG. It is written after a fit and again after the test. Central runs
    have a report too, with epochs instead of rounds. Without a logger nothing is recorded. TensorBoard gets
    an order of charts (tab Custom Scalars), tables of the last round and of metrics logged once, such as the
    test's (Text), and the run's options (HPARAMS).

    Args:
        page: whether to write the page and its figures, which takes a few seconds.
        max_clients: largest cohort for which the metrics of single clients are recorded, ≥ 0.
        waits_for_test: whether to write the page only after a test, or when `finish` is called.
        client_curves: whether loggers get each client's metrics too, as ``client/<number>/<name>``.

    Example:
        >>> from fl_lightning import Federation
        >>> callbacks = [Federation(), RunReport()]
    """

    def __init__(
        self,
        page: bool = True,
        max_clients: int = 1000,
        waits_for_test: bool = False,
        client_curves: bool = False,
    ) -> None:
        super().__init__()
        check_range("RunReport: max_clients", max_clients, "at least 0")
        self.page, self.max_clients, self.waits_for_test = page, max_clients, waits_for_test
        self.client_curves = client_curves
        self._folder: Path | None = None
        self._ahead: dict[str, Any] = {}  # metrics logged before the first round
        self._seen: dict[str, Any] = {}  # all metrics logged until the last recorded round
        self._recorded: int | None = None  # number of the last recorded epoch
        self._restore: Callable[[], None] | None = None  # restores the loggers
        self._began = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback behind all others except checkpoints, so that it records all of a round's metrics."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        saving = [each for each in callbacks if isinstance(each, Checkpoint)]
        others = [each for each in callbacks if each not in saving and each is not self]
        # a new list, because Lightning iterates over the old one
        trainer.callbacks = [*others, self, *saving]  # type: ignore[attr-defined]
        if stage == "fit" and federation_of(trainer) is not None:
            self._hold_constants(trainer, continues=trainer.current_epoch > 0)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Find out which metrics changed before the run was resumed: TensorBoard charts only such metrics."""
        if trainer.state.fn == "fit" and federation_of(trainer) is not None:
            self._hold_constants(trainer, continues=True)

    def _hold_constants(self, trainer: Trainer, *, continues: bool) -> None:
        self._restore_loggers()
        has_rounds = continues and trainer.is_global_zero and trainer.loggers
        earlier = History.read(Path(own_run_folder(trainer))).rounds if has_rounds else ()
        self._restore = hold_constants(trainer, earlier=earlier)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder, and write facts about the run into it, such as date, model and git commit."""
        folder = run_folder(trainer)  # a collective call: every process has to make it
        keeps = trainer.is_global_zero and trainer.loggers and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = Path(folder) if keeps else None
        self._seen, self._recorded, self._began = {}, None, time.monotonic()
        self._ahead = dict(trainer.callback_metrics)  # a sanity check would clear them
        if self._folder is not None:
            facts = provenance(trainer, pl_module)
            before = _provenance(self._folder) if trainer.ckpt_path else {}
            for name in before.keys() & _MAY_CHANGE:
                now = facts.get(name, "unknown")
                if name == "date" or before[name].split(_RESUMED)[-1] != now:
                    facts[name] = f"{before[name]}{_RESUMED}{now}"
            _write_provenance(self._folder, facts)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In central training, record the previous epoch, whose metrics are complete only now."""
        if (
            self._recorded is None
        ):  # before this hook, Lightning has not restored a resumed run's epoch
            self._recorded = trainer.current_epoch
        self.on_train_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the round's metrics, before its checkpoint is saved."""
        if federation_of(trainer) is not None:
            self._record(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In central training, record the last epoch's metrics."""
        number = trainer.current_epoch
        if (
            federation_of(trainer) is None
            and self._recorded is not None
            and number > self._recorded
        ):
            self._record(trainer, number)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write ``report.html``, unless a test follows the fit."""
        if self._folder is not None:
            facts = _provenance(self._folder)
            took = duration(time.monotonic() - self._began)
            took += " since it was resumed" if _RESUMED in facts.get("date", "") else ""
            reason = why_it_stopped(trainer)
            took += f", stopped {reason}" if reason else ""
            _write_provenance(self._folder, {"date": "", "duration": took, **facts})
        if not self.waits_for_test:
            self.finish(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep test metrics out of TensorBoard's charts, where each would be a chart with a single dot."""
        self._restore = hold_constants(trainer, ".*")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep metrics of the command ``validate`` out of TensorBoard's charts if no fit ran in this folder."""
        if trainer.state.fn == "validate" and not (Path(own_run_folder(trainer)) / NAME).exists():
            self._restore = hold_constants(trainer, ".*")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the metrics of the command ``validate`` in ``results.json``."""
        self._keep_evaluation(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the test's metrics in ``results.json``, and write ``report.html`` again with them."""
        self._keep_evaluation(trainer)
        self.finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the loggers' own ``log_metrics``, which was replaced during the run."""
        self._restore_loggers()

    def _keep_evaluation(self, trainer: Trainer) -> None:
        if self._restore is not None and trainer.state.fn != "fit":
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            keep_once(trainer, "test" if trainer.state.fn == "test" else "validation", found)
            self._restore_loggers()

    def _restore_loggers(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    def finish(self, trainer: Trainer) -> None:
        """Write ``report.html`` from the files in the run's folder; every process must call this."""
        folder = Path(run_folder(trainer))
        if not self.page or not trainer.is_global_zero or not (folder / NAME).exists():
            return
        try:
            with progress_bar(trainer, f"writing {REPORT}", 0):
                write_report(folder)
                show_results(trainer, folder, History.read(folder).without_twin())
        except OSError as error:  # e.g. a full disk; the run itself has ended well
            rank_zero_warn(f"{REPORT} was not written: {error}")
            return
        kind = detail() if self.waits_for_test else {}  # the command line prints the path itself
        rank_zero_info(f"report: {shown_path(str(folder / REPORT))}", **kind)

    def _record(self, trainer: Trainer, number: int) -> None:
        """Append the metrics of a round or an epoch to ``rounds.jsonl``."""
        if self._folder is None:
            return
        federation = federation_of(trainer)
        twins, clients = set[str](), dict[str, Sequence[float]]()
        if federation is not None and federation.rounds is not None:
            twins = federation.rounds.record.twins()
            clients = _of_clients(federation.rounds, self.max_clients)
        logged = self._ahead | trainer.callback_metrics
        # a metric that is logged again is another object
        new = {n: float(value) for n, value in logged.items() if self._seen.get(n) is not value}
        if not self._seen:
            begin(self._folder, number - 1)
        if self._seen.keys() != logged.keys():
            lay_out(trainer, logged.keys() - twins)
        self._seen, self._ahead, self._recorded = logged, {}, number
        append(self._folder, RoundLine(number, new, clients))
        if self.client_curves:
            shown = {name: values for name, values in clients.items() if name not in twins}
            self._log_clients(trainer, shown)

    def _log_clients(self, trainer: Trainer, found: Mapping[str, Sequence[float]]) -> None:
        if not found:
            rank_zero_warn(
                "client_curves: no curves of training metrics, because privacy hides clients, because "
                f"more than max_clients={self.max_clients} took part, or because the run has no clients"
            )
        values = {
            int(client): {name: found[name][n] for name in found.keys() - {IDS}}
            for n, client in enumerate(found.get(IDS, ()))
        }
        log_clients(trainer, values, step=trainer.global_step - 1)


def _of_clients(rounds: Any, most: int) -> dict[str, Sequence[float]]:
    """Return per-client metrics of a round; empty if privacy hides them or for more than ``most`` clients."""
    record, stages = rounds.record, rounds.stages
    hides = stages.hides_clients or any(part.hides_cohorts for part in stages.around_fit)
    if hides or len(record.finished) > most:
        return {}
    ids = sorted(record.finished)
    found: dict[str, Sequence[float]] = {IDS: ids}
    for name in record.means.names:
        values = record.means.by_client(name)
        found[name] = [values.get(client, math.nan) for client in ids]
    return found


def write_report(folder: str | Path) -> Path:
    """Write ``report.html`` and ``figures/`` into a run's folder; return the page's path.

    It can be called at any time, also for a run that was stopped or is still training.

    Args:
        folder: folder of the run, with ``rounds.jsonl``.

    Raises:
        ConfigurationError: if the folder has no rounds.
    """
    folder = Path(folder)
    history = History.read(folder).without_twin()
    if not history.rounds:
        inside = [str(path.parent) for path in sorted(folder.glob(f"*/{NAME}"))][:3]
        hint = f"such as {', '.join(inside)}" if inside else "one that had a RunReport"
        raise ConfigurationError(f"{folder} contains no {NAME}: give the folder of a run, {hint}")
    once, facts = logged_once(folder), _provenance(folder)
    page = Page(_title(folder, facts), f"{history.rounds[-1].number} {history.unit} · {folder}")
    page.facts(facts)
    page.tiles(_tiles(history, once))
    for fragment in sorted((folder / FRAGMENTS).glob("*.html")):
        page.include(fragment.read_text(encoding="utf-8"))
    for title, caption, panels in run_sections(folder, history):
        page.heading(title)
        page.text(caption)
        page.charts(panels, folder / FIGURES, prefix=f"{file_name(title)}-")
    if len(answers := read_table(folder / ANSWERS)):
        answers = answers.fillna("").drop_duplicates("prompt", keep="last")
        page.heading("Answers of the language model")
        page.table(list(answers.columns), answers.astype(str).to_numpy().tolist())
    page.heading("Numbers")
    _numbers(page, folder, history, once)
    if (folder / CONFIG).exists():
        page.verbatim((folder / CONFIG).read_text(encoding="utf-8"), "Configuration")
    page.write(folder / REPORT)
    return folder / REPORT


def _provenance(folder: Path) -> dict[str, str]:
    """Read the facts (date, model, …) that a run stored in its folder; empty without the file."""
    path = folder / PROVENANCE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {str(name): str(fact) for name, fact in known.items()}


def _write_provenance(folder: Path, facts: Mapping[str, str]) -> None:
    write_whole(folder / PROVENANCE, json.dumps(facts, indent=1) + "\n")


def _title(folder: Path, facts: Mapping[str, str]) -> str:
    """Return a report's title: the run's name, or model, data and algorithm if it has only a default name."""
    path = folder.absolute()
    name = path.parent.name if path.name.startswith("version_") else path.name
    if name != "lightning_logs":
        return name
    model, data = (facts.get(key, "").partition(",")[0] for key in ("model", "data"))
    return ", ".join(filter(None, (model, data, facts.get("algorithm")))) or name


def _tiles(history: History, once: Mapping[str, float]) -> list[tuple[str, str]]:
    last = history.rounds[-1]
    tests = {name: value for name, value in once.items() if is_of_test(name)}
    facts = [(name, f"{value:.4g}") for name, value in tests.items()][:3]
    shown = [name for name in history.names if name.startswith(("val/", "val_"))]
    for name in shown[:2]:
        number, value = [*history.curve(name).items()][-1]
        of = "" if number == last.number else f", after {number}"
        facts.append((f"{name}, last{of}", f"{value:.4g}"))
    facts.append((history.unit, str(last.number)))
    if asked := history.curve("round/cohort_size"):
        facts.append(("clients per round", f"{statistics.fmean(asked.values()):.4g}"))
    facts += _bytes(history, once)
    if seconds := history.curve("round/seconds"):
        facts.append(("seconds of rounds", f"{sum(seconds.values()):.4g}"))
    for name, words in (("", "ε"), ("_unamplified", "ε without amplification by sampling")):
        if epsilon := history.curve(f"privacy/epsilon{name}"):
            facts.append((words, f"{[*epsilon.values()][-1]:.4g}"))
    return facts


def _bytes(history: History, once: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for way, words in (("up", "from clients"), ("down", "to clients")):
        of = {p: sum(c.values()) for p, c in history.bytes_by_purpose(way, once).items()}
        if of:
            yield f"bytes {words}", in_bytes(sum(of.values()))
        if len(of) > 1:
            yield from ((f"bytes {words}: {purpose}", in_bytes(n)) for purpose, n in of.items())


def _numbers(page: Page, folder: Path, history: History, once: Mapping[str, float]) -> None:
    if once:
        rows = [[name, f"{value:.6g}"] for name, value in once.items()]
        page.table(["logged once", "value"], rows)
    for stage, table in evaluated_clients(folder).items():
        known = table.drop(columns=["client", "num_examples"], errors="ignore")
        spread = known.agg(["mean", lambda column: column.std(ddof=0), "min", "median", "max"])
        rows = [
            [name, str(known[name].count()), *(f"{n:.4g}" for n in spread[name])]
            for name in spread.columns
        ]
        head = [f"clients, {stage}", "with a number", "mean", "std", "min", "median", "max"]
        page.table(head, rows, fold=f"Over {len(table)} clients ({stage})")
    rows = []
    for name in history.names:
        values = [*history.curve(name).values()]
        numbers = [value for value in values if not math.isnan(value)] or values
        rows.append([name, *(f"{n:.6g}" for n in (values[-1], min(numbers), max(numbers)))])
    page.table(["logged", "last", "least", "most"], rows, fold="Everything that was logged")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command ``report`` to an argument parser."""
    parser.add_argument("run", metavar="RUN", help=f"Folder of a run, with its {NAME}.")


def report(given: Any) -> None:
    """Run the command ``report``: write a run's ``report.html`` again from its files.

    Raises:
        ConfigurationError: if the folder has no rounds.
    """
    print(f"report: {shown_path(str(write_report(given.run)))}")
