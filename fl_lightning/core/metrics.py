"""Metrics of clients: their mean over examples and their standard deviation over clients.

    mean = Σ_k w_k x_k / Σ_k w_k          std = sqrt(Σ_k (x_k - mean_u)² / K),  mean_u = Σ_k x_k / K

where client k's value x_k is a mean over w_k examples. The mean is that over the pooled examples;
the standard deviation weighs clients equally, because it describes clients.

For torchmetrics objects: saved states, and pooling over processes without torchmetrics' own exchange.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchmetrics import Metric

# Suffix of the name of a second metric: the weight of a logged value (``batch_size`` of `log`) per example.
PER_EXAMPLE = " per example"


class _ByClient(NamedTuple):
    """One metric's value and weight per client, sorted by client id."""

    clients: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


@dataclass
class _Entries:
    """One metric's values, weights and client ids, in the order in which they were added."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    known: _ByClient | None = None  # cached until the next value

    def by_client(self) -> _ByClient:
        if self.known is None:
            clients = np.array(self.clients, np.int64)
            order = np.argsort(clients, kind="stable")
            weights = np.array(self.weights, np.float64)
            values = _joined(self.values).numpy()
            self.known = _ByClient(clients[order], values[order], weights[order])
        return self.known


class ClientMeans:
    """Metrics with one value per client, and their means over clients, weighted by numbers of examples.

    Attributes:
        reductions: ``"sum"``, ``"min"`` or ``"max"`` over clients, by name of the metric; the mean
            for all others.

    Example:
        >>> means = ClientMeans()
        >>> means.add_rows({"train/loss": torch.tensor([1.0, 4.0])}, [1, 3], [0, 1])
        >>> means.reduced(), means.stds()
        ({'train/loss': 3.25}, {'train/loss_std': 1.5})
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entries] = {}
        self.reductions: dict[str, str] = {}

    def add_rows(
        self,
        values: Mapping[str, Tensor],
        num_examples: Sequence[float],
        client_ids: Sequence[int],
    ) -> None:
        """Add the metrics of m clients, in any order; each tensor has one value per client.

        A client's weight is its number of examples, times the metric ``<name> per example`` if given.
        """
        for name, value in values.items():
            if name.endswith(PER_EXAMPLE):
                continue
            entries = self._entries.setdefault(name, _Entries())
            entries.values.append(value)
            each = values.get(name + PER_EXAMPLE)
            factors = [1] * len(num_examples) if each is None else each.reshape(-1).tolist()
            entries.weights.extend(map(mul, num_examples, factors))
            entries.clients.extend(client_ids)
            entries.known = None

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order in which they were added."""
        return list(self._entries)

    def by_client(self, name: str) -> dict[int, float]:
        """Return one metric's value for each client id; empty if there is no such metric."""
        if name not in self._entries:
            return {}
        known = self._entries[name].by_client()
        return dict(zip(known.clients.tolist(), known.values.tolist(), strict=True))

    def reduced(self) -> dict[str, float]:
        """Return every metric over all clients: the mean over examples, or the sum, minimum or maximum."""
        found: dict[str, float] = {}
        kinds: dict[str, Any] = {"sum": np.sum, "min": np.min, "max": np.max}
        with np.errstate(all="ignore"):  # a value may be infinite
            for name, entries in self._entries.items():
                _, values, weights = entries.by_client()
                if name in self.reductions:
                    found[name] = float(kinds[self.reductions[name]](values))
                else:
                    found[name] = float((values * weights).sum() / weights.sum())
        return found

    def stds(self) -> dict[str, float]:
        """Return each metric's standard deviation over clients, with equal weights, as ``<name>_std``."""
        found: dict[str, float] = {}
        with np.errstate(all="ignore"):
            for name, entries in self._entries.items():
                found[f"{name}_std"] = float(entries.by_client().values.std())
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, integers and names only."""
        return {
            name: {
                "values": _joined(entries.values),
                "weights": list(entries.weights),
                "clients": list(entries.clients),
                "reduction": self.reductions.get(name),
            }
            for name, entries in self._entries.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all values by those from `state_dict`."""
        self._entries.clear()
        for name, entry in state.items():
            self.add_rows({name: entry["values"]}, entry["weights"], entry["clients"])
            if entry.get("reduction"):
                self.reductions[name] = entry["reduction"]

    def merge(self, other: ClientMeans) -> None:
        """Add the values of another `ClientMeans`, whose clients must be other ones."""
        self.reductions |= other.reductions
        for name, entries in other._entries.items():
            values = _joined(entries.values)
            self.add_rows({name: values}, entries.weights, entries.clients)


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Concatenate scalars and vectors to one float64 vector on the CPU."""
    if len({value.device for value in values}) > 1:  # those of a checkpoint are on the CPU
        values = [value.cpu() for value in values]
    vectors = [value.detach().reshape(-1) for value in values]
    whole = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
    return whole.to("cpu", torch.float64)


class MetricStates:
    """A snapshot of the states of torchmetrics objects, to restore them later.

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
        names = "_update_count", "_computed"
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written later
            self._saved = [
                (each, {n: copy.deepcopy(getattr(each, n)) for n in (*each.metric_state, *names)})
                for each in metrics
            ]

    def put_back(self) -> None:
        """Restore every torchmetrics object to its state in the snapshot."""
        for metric, attributes in self._saved:
            for name, value in attributes.items():
                setattr(metric, name, value)


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return all torchmetrics objects in a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextlib.contextmanager
def kept_apart(metrics: Iterable[Metric]) -> Iterator[None]:
    """Keep torchmetrics objects from synchronising over processes inside the block.

    If processes do different work, one that waits for the others in ``compute`` waits forever.
    """
    found = [(metric, metric.distributed_available_fn) for metric in metrics]
    for metric, _ in found:
        metric.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for metric, available in found:
            metric.distributed_available_fn = available


def pool(metric: Metric, states: Sequence[Mapping[str, Any]]) -> None:
    """Set a torchmetrics object's state to several states merged, as torchmetrics merges processes.

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
