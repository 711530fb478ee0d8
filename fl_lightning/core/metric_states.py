"""Save and restore torchmetrics objects, and pool them over processes without their own exchange."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
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
        # a metric's states, its number of updates and its computed value are plain attributes
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written later
            self._saved = [(metric, _attributes(metric)) for metric in metrics]

    def put_back(self) -> None:
        """Restore the state of every object."""
        for metric, attributes in self._saved:
            for name, value in attributes.items():
                setattr(metric, name, value)


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return all torchmetrics objects in a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextlib.contextmanager
def kept_apart(metrics: Iterable[Metric]) -> Iterator[None]:
    """Disable the exchange of torchmetrics objects between processes inside the block.

    If processes do different work, one that waits for the others in ``compute`` waits forever.
    """
    found = [(metric, metric.distributed_available_fn) for metric in metrics]
    for metric, _ in found:
        metric.distributed_available_fn = _alone
    try:
        yield
    finally:
        for metric, available in found:
            metric.distributed_available_fn = available


def _alone() -> bool:
    return False


def pool(metric: Metric, states: Sequence[Mapping[str, Any]]) -> None:
    """Set a torchmetrics object to the pooled states of several, as its own exchange would.

    Example:
        >>> from torchmetrics import SumMetric
        >>> one, other = SumMetric(), SumMetric()
        >>> one.update(1.0), other.update(2.0)
        (None, None)
        >>> pool(one, [one.metric_state, other.metric_state])
        >>> one.compute()
        tensor(3.)
    """
    if not states:
        return
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        if isinstance(values[0], list):
            pooled: Any = [entry.to(metric.device) for value in values for entry in value]
        else:
            pooled = torch.stack([value.to(metric.device) for value in values])
            pooled = reduction(pooled) if callable(reduction) else pooled
        setattr(metric, name, pooled)
    metric._update_count = max(1, metric._update_count)
    metric._computed = None


def _attributes(metric: Metric) -> dict[str, Any]:
    names = [*metric.metric_state, "_update_count", "_computed"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names}
