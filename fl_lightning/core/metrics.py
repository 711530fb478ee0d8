"""Means whose sum and weight stay apart until the end, and their spread over clients.

    mean = Σ_k w_k x_k / Σ_k w_k          spread = sqrt(Σ_k (x_k - mean_u)² / K),  mean_u = Σ_k x_k / K

where client k's value x_k stands for w_k examples. The mean is the one over the pooled examples;
the spread counts every client once, because it is a statement about clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the mean of scalars in float32, a scalar on their device.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [1, 2])
        tensor(3.)
    """
    if len(values) == 1:
        return values[0].float()
    stacked = torch.stack(tuple(values)).float()
    shares = torch.tensor(weights, dtype=torch.float32, device=stacked.device)
    return torch.dot(stacked, shares) / sum(weights)


class _ByClient(NamedTuple):
    """A metric's clients in increasing order, and their values and numbers of examples."""

    clients: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


class ClientMeans:
    """Values of named metrics, one per client, with the number of examples behind each.

    Example:
        >>> means = ClientMeans()
        >>> means.add({"train/loss": torch.tensor(1.0)}, num_examples=1)
        >>> means.add({"train/loss": torch.tensor(4.0)}, num_examples=3)
        >>> means.mean("train/loss"), means.spread("train/loss")
        (3.25, 1.5)
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self._num_examples: dict[str, list[int]] = {}
        self._clients: dict[str, list[int]] = {}
        self._known: dict[str, _ByClient] = {}  # of names that nothing was added to since

    def add(self, values: Mapping[str, Tensor], num_examples: int, client_id: int = 0) -> None:
        """Take in one client's scalars; results do not depend on the order of different clients."""
        self.add_group(values, [num_examples], [client_id])

    def add_group(
        self,
        values: Mapping[str, Tensor],
        num_examples: Sequence[int],
        client_ids: Sequence[int],
    ) -> None:
        """Take in the values of m clients, each tensor with m elements."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.detach().reshape(-1))
            self._num_examples.setdefault(name, []).extend(num_examples)
            self._clients.setdefault(name, []).extend(client_ids)
            self._known.pop(name, None)

    @property
    def names(self) -> list[str]:
        """What has been added so far, in order of appearance."""
        return list(self._values)

    def values(self, name: str) -> Tensor:
        """Return one metric's values by client, shape (number of clients,), float64 on the CPU."""
        return torch.from_numpy(self._by_client(name).values)

    def by_client(self, name: str) -> dict[int, float]:
        """Return one metric's value of each client; empty if there is no such metric."""
        if name not in self._values:
            return {}
        known = self._by_client(name)
        return dict(zip(known.clients.tolist(), known.values.tolist(), strict=True))

    def mean(self, name: str) -> float:
        """Return the mean weighted by examples."""
        known = self._by_client(name)
        with np.errstate(all="ignore"):  # a value may be infinite
            return float((known.values * known.weights).sum() / known.weights.sum())

    def spread(self, name: str) -> float:
        """Return the standard deviation over clients, each counted once."""
        with np.errstate(all="ignore"):
            return float(self._by_client(name).values.std())

    def _by_client(self, name: str) -> _ByClient:
        if name not in self._known:
            clients = np.array(self._clients[name], np.int64)
            order = np.argsort(clients, kind="stable")
            values = _joined(self._values[name]).numpy()
            weights = np.array(self._num_examples[name], np.float64)
            self._known[name] = _ByClient(clients[order], values[order], weights[order])
        return self._known[name]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and integers only, for a checkpoint."""
        return {
            name: {
                "values": _joined(self._values[name]),
                "num_examples": list(self._num_examples[name]),
                "clients": list(self._clients[name]),
            }
            for name in self._values
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._values = {name: [entry["values"]] for name, entry in state.items()}
        self._num_examples = {name: list(e["num_examples"]) for name, e in state.items()}
        self._clients = {name: list(entry["clients"]) for name, entry in state.items()}
        self._known.clear()

    def merge(self, other: ClientMeans) -> None:
        """Take in the clients of another, of which none is in this one."""
        for name in other.names:
            self._values.setdefault(name, []).extend(v.cpu() for v in other._values[name])
            self._num_examples.setdefault(name, []).extend(other._num_examples[name])
            self._clients.setdefault(name, []).extend(other._clients[name])
            self._known.pop(name, None)


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Return vectors end to end, in float64 on the CPU."""
    whole = values[0] if len(values) == 1 else torch.cat(tuple(values))
    return whole.to("cpu", torch.float64)
