"""States of logged torchmetrics objects, from sites to the server, where they are pooled.

So a metric is that of all clients' examples together, and not a mean of metrics. A state that is a list
holds what examples gave (predictions, labels): it stays at its site, and the metric is missing then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.metrics import pool

log = logging.getLogger(__name__)
OPTION = "logged"
_PREFIX = "stage/metrics/"


@dataclass(frozen=True)
class MetricSums:
    """Sums of a site's metrics, as they leave it.

    Attributes:
        logged: name, name per epoch and place in the module of each.
        states: by place, each by name.
    """

    logged: list[list[str]]
    states: dict[str, dict[str, Tensor]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states as they travel."""
        return {
            f"{_PREFIX}{place}/{name}": tensor.detach().cpu()
            for place, state in self.states.items()
            for name, tensor in state.items()
        }


def taken_sums(
    collector: LogCollector, module: nn.Module, allows: Callable[[str], bool]
) -> MetricSums:
    """Return what a site's clients have logged since the last call, and reset the objects.

    Args:
        collector: of what they log.
        module: in which the objects are.
        allows: whether a metric of a name may leave.
    """
    states: dict[str, dict[str, Tensor]] = {}
    logged: list[list[str]] = []
    places = {id(child): path for path, child in module.named_modules()}
    for name, metric in collector.metrics.items():
        epoch_name, place = collector.epoch_names[name], places.get(id(metric))
        state: dict[str, Any] = dict(metric.metric_state)
        if place is None or not all(isinstance(value, Tensor) for value in state.values()):
            log.warning("metric %s stays here: it holds what single examples gave", name)
        elif allows(epoch_name):
            states[place] = {key: value.clone() for key, value in state.items()}
            logged.append([name, epoch_name, place])
    collector.collect_metrics()
    return MetricSums(logged, states)


def told_sums(logged: Any, tensors: Mapping[str, Tensor], module: nn.Module) -> MetricSums:
    """Return what a site has told of metrics, if it fits the module's objects.

    Raises:
        ValueError: if it does not.
    """
    metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
    states: dict[str, dict[str, Tensor]] = {}
    for entry in logged if isinstance(logged, list) else [None]:
        name, _, place = _texts(entry, 3)
        if place not in metrics:
            raise ValueError("what it has logged is no metric of the module")
        ours: dict[str, Any] = dict(metrics[place].metric_state)
        found = {state: tensors.get(f"{_PREFIX}{place}/{state}") for state in ours}
        for state, value in ours.items():
            told = found[state]
            if told is None or (told.shape, told.dtype) != (value.shape, value.dtype):
                raise ValueError(f"the state {state} of its metric {name} does not fit")
        states[place] = found  # type: ignore[assignment]
    return MetricSums(logged, states)


def _texts(entry: Any, number: int) -> list[str]:
    """Return a list of so many texts.

    Raises:
        ValueError: if it is none.
    """
    texts = [part for part in entry if isinstance(part, str)] if isinstance(entry, list) else []
    if len(texts) != number or texts != entry:
        raise ValueError("what it has logged is no metric of the module")
    return texts


def pool_sums(sums: Iterable[MetricSums], collector: LogCollector, module: nn.Module) -> None:
    """Give the module's objects the examples of all sites."""
    all_of_them = list(sums)
    for name, epoch_name, place in sorted({tuple(e) for each in all_of_them for e in each.logged}):
        collector.add_metric(name, epoch_name, module.get_submodule(place))  # type: ignore[arg-type]
    for place in sorted({place for each in all_of_them for place in each.states}):
        states = [each.states[place] for each in all_of_them if place in each.states]
        pool(module.get_submodule(place), states)  # type: ignore[arg-type]
