"""Callbacks that the command line adds to every run: overview, progress, logs, checkpoints, reports."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar

from fl_lightning.callbacks.client_evaluation import ClientEvaluation
from fl_lightning.reports.evaluated_model import ResultsTable
from fl_lightning.reports.log_file import Level, RunLog
from fl_lightning.reports.overview import PartitionReport, RunOverview
from fl_lightning.reports.progress import RoundProgressBar
from fl_lightning.reports.run_report import RunReport

# kinds of callbacks of which a run needs one
_ONE_EACH = (ProgressBar, PartitionReport, ClientEvaluation, RunLog, ResultsTable, RunReport)


def standard_callbacks(
    *given: Callback,
    log_level: Level = "info",
    progress_bar: bool = True,
    checkpoint: bool = True,
    is_federated: bool = True,
    report: bool = True,
) -> list[Callback]:
    """Return the callbacks that the command line adds to every run, to give to a Trainer in Python.

    They show an overview before the first round and a progress bar of rounds, and write ``run.log``, the
    partition as picture and table, every client's metrics at the end, ``last.ckpt`` after every round, a
    table of results and a report.

    Args:
        given: your own callbacks, which come first and replace callbacks of the same kind.
        log_level: lowest level of the messages in ``run.log``.
        progress_bar: whether to show a progress bar of rounds; if False, set the Trainer's
            ``enable_progress_bar`` to False as well.
        checkpoint: whether to save ``last.ckpt``.
        is_federated: whether the run has a `Federation`; if False, the callbacks about clients are left
            out.
        report: whether to write ``report.html`` at the end of a fit.

    Example:
        >>> [type(callback).__name__ for callback in standard_callbacks(RoundProgressBar(0))]
        ... # doctest: +NORMALIZE_WHITESPACE
        ['RoundProgressBar', 'RunLog', 'PartitionReport', 'ClientEvaluation', 'RunOverview',
        'ModelCheckpoint', 'ResultsTable', 'RunReport']
    """
    watchers: list[Callback] = [RunLog(log_level)]
    if is_federated:
        watchers += [PartitionReport(), ClientEvaluation()]
    watchers.append(RunOverview())
    if progress_bar:
        watchers.append(RoundProgressBar())
    keeps_last = any(isinstance(c, ModelCheckpoint) and c.save_last for c in given)
    if checkpoint and not keeps_last:
        watchers.append(every_round_checkpoint())
    watchers.append(ResultsTable())
    if report:
        watchers.append(RunReport())
    given_kinds = [kind for kind in _ONE_EACH for old in given if isinstance(old, kind)]
    news = [new for new in watchers if not isinstance(new, tuple(given_kinds))]
    # tables and reports come last, because they show metrics that the other callbacks log
    return sorted(
        [*given, *news], key=lambda callback: isinstance(callback, ResultsTable | RunReport)
    )


def every_round_checkpoint() -> ModelCheckpoint:
    """Return a callback that saves a checkpoint after every round, always as ``last.ckpt``.

    (``save_last`` alone saves only when the callback saves another checkpoint as well.)
    """
    return ModelCheckpoint(
        filename="last", enable_version_counter=False, save_on_train_epoch_end=True
    )
