"""The global model, which the server sends to clients, and the updates that they return."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from fl_lightning.core.errors import ClientFailure

T = TypeVar("T")


@dataclass(frozen=True)
class GlobalModel:
    """The global model as two vectors: trainable parameters, and other state such as buffers.

    Attributes:
        params: trainable shared parameters as one vector, shape (k,).
        buffers: other state that clients change as one vector, shape (b,): floating-point buffers, and
            frozen parameters that clients change.
    """

    params: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class ClientUpdate:
    """The update of one client in a round: delta, buffers, number of examples, metrics.

    Attributes:
        client_id: number of the client.
        delta: ``start - end`` of local training, shape (k,): the pseudo-gradient, which the
            server optimizer descends.
        buffers: floating-point buffers after local training, shape (b,).
        num_examples: aggregation weight, ≥ 1: size of the client's shard, or the sum of a column of it.
        num_steps: number of local steps, one per batch (or per several accumulated batches).
        metrics: means over the client's local steps by name, each a scalar tensor.
        active: True for coordinates that the client may move, bool, shape (k,); None if all. The
            others are 0 and are not sent.
        effective_steps: ‖a‖₁, the number of local gradients that the delta sums up, see
            `fl_lightning.client.local_solver`; None if the aggregator does not need it.
        optimizer_steps: number of local steps that the optimizer took: all but those whose training
            step skipped its batch or that a gradient scaler skipped. None for all. With several
            optimizers, the steps of each.
    """

    client_id: int
    delta: Tensor
    buffers: Tensor
    num_examples: int
    num_steps: int
    metrics: dict[str, Tensor] = field(default_factory=dict)
    active: Tensor | None = None
    effective_steps: float | None = None
    optimizer_steps: int | tuple[int, ...] | None = None

    @cached_property
    def norm(self) -> Tensor:
        """L2 norm of the delta, a scalar; NaN or infinite if a coordinate is."""
        norm: Tensor = torch.linalg.vector_norm(self.delta)
        return norm


@dataclass(frozen=True)
class Updates:
    """The updates of m ≥ 1 clients, stacked: one row of each tensor per client.

    Updates from a generator must be used before the next ones are requested. Iterating yields a
    `ClientUpdate` per client.

    Attributes:
        client_ids: numbers of the clients, m of them.
        deltas: shape (m, k).
        buffers: shape (m, b).
        num_examples: aggregation weights.
        num_steps: numbers of local steps.
        metrics: means over each client's local steps by name, each with m elements.
        effective_steps: one value per client, as in `ClientUpdate`.
        optimizer_steps: one value per client, as in `ClientUpdate`; None for all local steps.
        active: one mask per client, as in `ClientUpdate`; None for all coordinates.

    Example:
        >>> updates = Updates([4, 7], torch.eye(2), torch.empty(2, 0), [10, 20], [1, 2])
        >>> [update.delta for update in updates]
        [tensor([1., 0.]), tensor([0., 1.])]
    """

    client_ids: list[int]
    deltas: Tensor
    buffers: Tensor
    num_examples: list[int]
    num_steps: list[int]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    effective_steps: list[float] | None = None
    optimizer_steps: list[int | tuple[int, ...] | None] | None = None
    active: list[Tensor | None] | None = None

    @staticmethod
    def of(update: ClientUpdate | Updates) -> Updates:
        """Convert one client's update to `Updates` of one row; `Updates` are returned unchanged."""
        if isinstance(update, Updates):
            return update
        steps = update.effective_steps
        row = Updates(
            [update.client_id],
            update.delta.unsqueeze(0),
            update.buffers.unsqueeze(0),
            [update.num_examples],
            [update.num_steps],
            update.metrics,
            None if steps is None else [steps],
            [update.optimizer_steps],
            [update.active],
        )
        vars(row)["_views"] = [update]
        if "norm" in vars(update):  # known since the update was checked
            vars(row)["norms"] = update.norm.reshape(1)
        return row

    def __iter__(self) -> Iterator[ClientUpdate]:
        return iter(self._views)

    @cached_property
    def _views(self) -> list[ClientUpdate]:
        return [
            ClientUpdate(
                client_id,
                self.deltas[row],
                self.buffers[row],
                self.num_examples[row],
                self.num_steps[row],
                {name: values.reshape(-1)[row] for name, values in self.metrics.items()},
                active=None if self.active is None else self.active[row],
                effective_steps=None if self.effective_steps is None else self.effective_steps[row],
                optimizer_steps=None if self.optimizer_steps is None else self.optimizer_steps[row],
            )
            for row, client_id in enumerate(self.client_ids)
        ]

    def rows(self, kept: list[int]) -> Updates:
        """Return the updates with the row numbers ``kept``.

        Example:
            >>> updates = Updates([4, 7], torch.eye(2), torch.empty(2, 0), [10, 20], [1, 2])
            >>> updates.rows([1]).client_ids
            [7]
        """

        def some(values: list[T]) -> list[T]:
            return [values[row] for row in kept]

        return Updates(
            client_ids=some(self.client_ids),
            deltas=self.deltas[kept],
            buffers=self.buffers[kept],
            num_examples=some(self.num_examples),
            num_steps=some(self.num_steps),
            metrics={name: values.reshape(-1)[kept] for name, values in self.metrics.items()},
            effective_steps=self.effective_steps and some(self.effective_steps),
            optimizer_steps=self.optimizer_steps and some(self.optimizer_steps),
            active=self.active and some(self.active),
        )

    @cached_property
    def norms(self) -> Tensor:
        """L2 norm of each client's delta, shape (m,)."""
        if len(self.client_ids) == 1:  # bit-identical to the norm of a single update
            return self._views[0].norm.reshape(1)
        norms: Tensor = torch.linalg.vector_norm(self.deltas, dim=1)
        return norms


def check_finite(update: ClientUpdate) -> None:
    """Raise ClientFailure if an update's loss, delta or buffers are not finite."""
    both = update.metrics.get("train/loss", update.norm), update.norm
    if update.norm.device.type == "cpu":
        loss_value, norm = map(float, both)
    else:  # an accelerator is waited for once
        loss_value, norm = torch.stack([each.to(update.norm.dtype) for each in both]).tolist()
    if not math.isfinite(loss_value) and "train/loss" in update.metrics:
        raise ClientFailure(update.client_id, f"its training loss is {loss_value}")
    if not math.isfinite(norm):
        raise ClientFailure(update.client_id, "its update holds NaN or infinite values")
    if update.buffers.numel() and not bool(torch.isfinite(update.buffers).all()):
        raise ClientFailure(update.client_id, "its buffers hold NaN or infinite values")
