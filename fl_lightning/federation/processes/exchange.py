"""Once per round the processes meet: what each did becomes what all did.

Everything small goes through one gather: failures, counts, clients' metrics, the states of logged
torchmetrics objects, the fp16 scale. The updates follow, added up, if nothing failed. Afterwards
every process knows the same and does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchmetrics import Metric

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import pool
from fl_lightning.federation.checkpoints.run_memory import Waiting
from fl_lightning.federation.round_record import RoundRecord

Failure = ClientFailure | ConfigurationError


@dataclass(frozen=True)
class Report:
    """What one process tells the others about a round.

    Attributes:
        failure: what stopped its clients.
        record: its counts and its clients' metrics.
        scaler: the fp16 scaler's state.
        logged: every logged torchmetrics object's name, its name per epoch, its place in the module.
        metric_states: the states of those objects by place.
        prog_bar: names of values that are shown beside the progress bar.
        memories: what its clients remember from this round on.
        stops: whether it was asked to stop after this round.
    """

    failure: Failure | None
    record: dict[str, Any]
    scaler: dict[str, Any]
    logged: list[tuple[str, str, str]]
    metric_states: dict[str, Any]
    prog_bar: set[str]
    memories: list[Waiting]
    stops: bool


def first_failure(reports: Sequence[Report]) -> Failure | None:
    """Return the failure that one process alone would have met first, that of the lowest client."""
    failures = [report.failure for report in reports if report.failure is not None]
    return min(failures, key=lambda failure: getattr(failure, "client_id", -1), default=None)


def merged_record(reports: Sequence[Report]) -> RoundRecord:
    """Return the round's record over all processes."""
    merged, *others = (RoundRecord.from_state_dict(report.record) for report in reports)
    for other in others:
        merged.merge(other)
    return merged


def logged_metrics(collector: LogCollector, module: nn.Module) -> list[tuple[str, str, str]]:
    """Return what `Report.logged` tells.

    Raises:
        ConfigurationError: for an object that is not in the module, where others cannot find it.
    """
    places = {id(c): path for path, c in module.named_modules() if isinstance(c, Metric)}
    for name, metric in collector.metrics.items():
        if id(metric) not in places:
            raise ConfigurationError(
                f"self.log({name!r}, …) in training_step: with several processes the torchmetrics "
                "object must be an attribute of the module, set in __init__"
            )
    return [(n, collector.epoch_names[n], places[id(m)]) for n, m in collector.metrics.items()]


def pool_metrics(reports: Sequence[Report], collector: LogCollector, module: nn.Module) -> None:
    """Give every logged torchmetrics object the examples of all processes."""
    for name, epoch_name, place in sorted({entry for r in reports for entry in r.logged}):
        metric = module.get_submodule(place)
        assert isinstance(metric, Metric)
        collector.add_metric(name, epoch_name, metric)
    for place in sorted({place for report in reports for place in report.metric_states}):
        metric = module.get_submodule(place)
        states = [r.metric_states[place] for r in reports if place in r.metric_states]
        pool(metric, states)  # type: ignore[arg-type]
    for report in reports:
        collector.prog_bar |= report.prog_bar
