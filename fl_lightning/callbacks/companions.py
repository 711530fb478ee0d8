"""The callbacks that a run has beside its federation, on the command line and in Python."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar

from fl_lightning.callbacks.client_evaluation import ClientEvaluation
from fl_lightning.reports.evaluated_model import ResultsTable
from fl_lightning.reports.log_file import Level, RunLog
from fl_lightning.reports.overview import PartitionReport, RunOverview
from fl_lightning.reports.progress import RoundProgressBar
from fl_lightning.reports.run_report import RunReport

# of these one is enough, of any kind
_ONE_EACH = (ProgressBar, PartitionReport, ClientEvaluation, RunLog, ResultsTable, RunReport)


def companions(
    *given: Callback,
    log_level: Level = "info",
    progress_bar: bool = True,
    checkpoint: bool = True,
    is_federated: bool = True,
    report: bool = True,
) -> list[Callback]:
    """Callbacks that the command line adds to a `Federation`, for a Trainer in Python.

    An overview before the first round, a bar of rounds, ``run.log``, the partition as picture and table,
    every client's metrics at the end, ``last.ckpt`` after every round, a table of results and a report.

    Args:
        given: callbacks of your own, which come first; what one of them does already is left out.
        log_level: of the least important messages that ``run.log`` keeps.
        progress_bar: whether to show rounds; with False also tell the Trainer, by
            ``enable_progress_bar``.
        checkpoint: whether to save ``last.ckpt``.
        is_federated: whether there is a `Federation`; without it nothing is said of clients.
        report: whether to write ``report.html`` at the end of a fit.

    Example:
        >>> [type(callback).__name__ for callback in companions(RoundProgressBar(0))]
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
    done = [kind for kind in _ONE_EACH for old in given if isinstance(old, kind)]
    news = [new for new in watchers if not isinstance(new, tuple(done))]
    # which tells what the others have found
    return sorted(
        [*given, *news], key=lambda callback: isinstance(callback, ResultsTable | RunReport)
    )


def every_round_checkpoint() -> ModelCheckpoint:
    """Return a callback that overwrites ``last.ckpt`` at the end of every round.

    A killed run loses no more than the round it was in. (``save_last`` alone saves only when the
    callback saves another checkpoint as well.)
    """
    return ModelCheckpoint(
        filename="last", enable_version_counter=False, save_on_train_epoch_end=True
    )
