"""Winding torchmetrics objects back, wherever in a module they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from torchmetrics import Metric


class MetricStates:
    """The states of torchmetrics objects at one moment.

    Args:
        metrics: the objects, e.g. `metrics_of` a module.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> before = MetricStates([metric])
        >>> metric.update(3.0)
        >>> before.put_back()
        >>> float(metric.sum_value)
        0.0
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        # its states, and whether it was updated and computed, are plain attributes of a metric
        self._saved = [(metric, _attributes(metric)) for metric in metrics]

    def put_back(self) -> None:
        """Give every object the state it had."""
        for metric, attributes in self._saved:
            for name, value in attributes.items():
                setattr(metric, name, value)


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return all torchmetrics objects in a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def _attributes(metric: Metric) -> dict[str, Any]:
    names = [*metric.metric_state, "_update_count", "_computed"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names}
