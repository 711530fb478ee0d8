"""Exchange of results between processes, once per round.

One gather exchanges everything small: failures, counts, clients' metrics and the states of logged
torchmetrics objects. If nothing failed, sums of updates and client states follow. Afterwards all
processes hold the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from fl_lightning.client.log_collector import LoggedMetrics
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.federation.processes.fork import ProcessTraceback, traceback_behind
from fl_lightning.federation.processes.interruption import interruption_of
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.server.server import Server

Failure = ClientFailure | ConfigurationError
# New client states that take effect after the server step: number of entries and dtype of each, by name of the
# state, such as "correction", and client id
Waiting = Mapping[tuple[str, int], tuple[int, torch.dtype]]


@dataclass(frozen=True)
class Report:
    """Results of one process's clients in a round, sent to all other processes."""

    failure: Failure | None  # the error that stopped its clients
    behind: str | None  # the traceback of the error's cause, which is not sent; None without one
    record: dict[str, Any]  # its counts and its clients' metrics
    metrics: LoggedMetrics
    prog_bar: set[str]  # names of values that are shown in the progress bar
    memories: Waiting  # sizes and types of its clients' new states
    stops: bool  # whether it was asked to stop after this round


def exchange(run: Run, record: RoundRecord, server: Server, failure: Failure | None) -> RoundRecord:
    """Share the results of a round among all processes, and return the merged record; every process calls this.

    Args:
        run: the run in this process.
        record: record of this process's clients.
        server: has received the updates of this process's clients.
        failure: the error that stopped this process's clients; None without one.

    Raises:
        ClientFailure: in all processes, if a client failed in one.
        ConfigurationError: in all processes, if a client changed a tensor that counts as constant, or if
            a logged torchmetrics object is no part of the module.
    """
    collector, module, ranks = run.collector, run.module, run.ranks
    interruption = interruption_of(run.trainer)
    collector.check_metrics(module)
    found = collector.metric_states(module)
    report = Report(
        failure=failure,
        behind=None if failure is None else traceback_behind(failure),
        record=record.state_dict(),
        metrics=replace(found, states=move_data_to_device(found.states, "cpu")),
        prog_bar=collector.prog_bar,
        memories={k: (v.numel(), v.dtype) for k, v in run.memory.waiting().items()},
        stops=interruption is not None and interruption.is_asked,
    )
    reports = ranks.gather(report)
    if first := first_failure(reports):
        raise first
    if interruption is not None and any(report.stops for report in reports):
        interruption.agree()
    collector.pool_metrics([each.metrics for each in reports], module)
    collector.prog_bar |= {name for each in reports for name in each.prog_bar}
    server.reduce(ranks.all_reduce, ranks.gather)
    share_memories(run, [report.memories for report in reports])
    merged, *others = (RoundRecord.from_state_dict(report.record) for report in reports)
    for other in others:
        merged.merge(other)
    return merged


def first_failure(reports: Sequence[Report]) -> Failure | None:
    """Return the failure of the failed client with the lowest id, which a single process would raise."""
    failures = {r.failure: r.behind for r in reports if r.failure is not None}
    first = min(failures, key=lambda failure: getattr(failure, "client_id", -1), default=None)
    if first is not None and (behind := failures[first]) is not None:
        first.__cause__ = ProcessTraceback(behind, behind)
    return first


def share_memories(run: Run, waiting: Sequence[Waiting]) -> None:
    """Send clients' new states of a round to all processes; every process must call this.

    The vectors are sent one after the other, so that no process holds all of them in RAM.

    Args:
        run: the run in this process.
        waiting: the new states of every process, in order of rank.
    """
    own, device = run.memory.waiting(), run.local.space.device
    for rank, states in enumerate(waiting):
        for key, (size, dtype) in states.items():
            if rank == run.ranks.rank:
                run.ranks.broadcast(own[key].to(device), source=rank)
                continue
            vector = torch.empty(size, dtype=dtype, device=device)
            run.ranks.broadcast(vector, source=rank)
            run.memory.put(*key, vector)
