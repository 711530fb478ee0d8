"""The model that goes down to clients, and the updates that come back: deltas with their numbers of examples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ClientFailure

Rows = slice | list[int]
T = TypeVar("T")


@dataclass(frozen=True)
class GlobalModel:
    """The model that the server broadcasts.

    Attributes:
        params: parameters that train and are shared, as one vector, shape (k,).
        buffers: state of the module that clients change besides, as one vector, shape (b,):
            floating-point buffers, and frozen parameters that clients change.
    """

    params: Tensor
    buffers: Tensor


class LazyDeltas(Protocol):
    """Deltas of m clients, shape (m, k), whose numbers nobody may need.

    That these are finite is looked at when somebody does: whatever gives them raises `NotFinite`.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""

    @property
    def numbers(self) -> Tensor:
        """All of them, finite or not, shape (m, k)."""

    @property
    def whole(self) -> Tensor:
        """All numbers, shape (m, k), each of which is finite."""

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each, shape (m,), finite. Cheap once folded."""

    @property
    def are_finite(self) -> bool:
        """Whether all numbers are finite, found without them; False also if they may not be."""

    def of(self, rows: Rows) -> LazyDeltas:
        """Return those of some clients."""

    def fold(self, mean: Tensor, shares: npt.ArrayLike) -> None:
        """Have a mean, shape (k,), take in one after the other: m ← m + share · (delta - m).

        It is as before if a number or a norm is not finite.
        """


@dataclass(frozen=True)
class ClientUpdate:
    """One client's contribution to a round: a row of `Updates`, for rules that want one at a time.

    Attributes:
        client_id: whose it is.
        delta: ``start - end`` of local training, shape (k,): the pseudo-gradient, which the
            server optimizer descends.
        buffers: floating-point buffers after local training, shape (b,).
        num_examples: size of the client's shard, the aggregation weight, ≥ 1.
        num_steps: local steps, one per batch (or per several that are accumulated).
        metrics: means over the client's local steps by name, each a scalar tensor.
        active: which coordinates the client may move, bool, shape (k,); None if all. The others
            are 0 and do not travel.
        effective_steps: ‖a‖₁, how many gradients the delta adds up to, see
            `fl_lightning.client.local_solver`; None where nobody asks for it.
        optimizer_steps: how many of the local steps the optimizer took: not those whose training
            step skipped its batch, nor those that a gradient scaler left out. None for all. Where
            the module has several optimizers, the steps of each. They are counted for corrections,
            for aggregators that divide by them, and for stages of the user's own.
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
        """The L2 norm of the delta; it is finite only if every coordinate is."""
        norm: Tensor = torch.linalg.vector_norm(self.delta)
        return norm


@dataclass(frozen=True)
class Updates:
    """The contributions of m ≥ 1 clients, a row each: what travels through a round.

    Those that a generator yields are to be used before the next ones are asked for. Iterating gives
    each client's as a `ClientUpdate`.

    Attributes:
        client_ids: whose they are, m of them.
        deltas: shape (m, k), where they are multiplied out, see `whole`.
        buffers: shape (m, b).
        num_examples: aggregation weights.
        num_steps: local steps.
        metrics: means over each client's local steps by name, each of m elements.
        effective_steps: of each client, as in `ClientUpdate`.
        optimizer_steps: of each client, as in `ClientUpdate`; None for all local steps.
        active: of each client, as in `ClientUpdate`; None for all coordinates.

    Example:
        >>> updates = Updates([4, 7], torch.eye(2), torch.empty(2, 0), [10, 20], [1, 2])
        >>> [update.delta for update in updates]
        [tensor([1., 0.]), tensor([0., 1.])]
    """

    client_ids: list[int]
    deltas: Tensor | LazyDeltas
    buffers: Tensor
    num_examples: list[int]
    num_steps: list[int]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    effective_steps: list[float] | None = None
    optimizer_steps: list[int | tuple[int, ...] | None] | None = None
    active: list[Tensor | None] | None = None

    @staticmethod
    def of(update: ClientUpdate | Updates) -> Updates:
        """Return one client's update as a row; several in this form as they are."""
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
        vars(row)["_views"] = [update]  # whose norm may be known
        return row

    def __iter__(self) -> Iterator[ClientUpdate]:
        return iter(self._views)

    @cached_property
    def _views(self) -> list[ClientUpdate]:
        whole = self.whole
        return [
            ClientUpdate(
                client_id,
                whole[row],
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
        """Return the clients in these rows alone.

        Example:
            >>> updates = Updates([4, 7], torch.eye(2), torch.empty(2, 0), [10, 20], [1, 2])
            >>> updates.rows([1]).client_ids
            [7]
        """

        def some(values: list[T]) -> list[T]:
            return [values[row] for row in kept]

        return Updates(
            client_ids=some(self.client_ids),
            deltas=rows_of(self.deltas, kept),
            buffers=self.buffers[kept],
            num_examples=some(self.num_examples),
            num_steps=some(self.num_steps),
            metrics={name: values.reshape(-1)[kept] for name, values in self.metrics.items()},
            effective_steps=self.effective_steps and some(self.effective_steps),
            optimizer_steps=self.optimizer_steps and some(self.optimizer_steps),
            active=self.active and some(self.active),
        )

    @property
    def whole(self) -> Tensor:
        """All numbers of the deltas, shape (m, k).

        Raises:
            NotFinite: if one is not finite and nobody has looked so far.
        """
        return self.deltas if isinstance(self.deltas, Tensor) else self.deltas.whole

    def multiplied_out(self) -> Updates:
        """Return the same with the numbers of the deltas, finite or not."""
        if isinstance(self.deltas, Tensor):
            return self
        return replace(self, deltas=self.deltas.numbers)

    @cached_property
    def norms(self) -> Tensor:
        """The L2 norm of each delta, shape (m,).

        Raises:
            NotFinite: as `whole`.
        """
        if not isinstance(self.deltas, Tensor):
            return self.deltas.norms
        if len(self.client_ids) == 1:  # to the bit the norm of a single update
            return self._views[0].norm.reshape(1)
        norms: Tensor = torch.linalg.vector_norm(self.deltas, dim=1)
        return norms


def rows_of(deltas: Tensor | LazyDeltas, rows: Rows) -> Tensor | LazyDeltas:
    """Return the deltas of some clients."""
    return deltas[rows] if isinstance(deltas, Tensor) else deltas.of(rows)


def check_finite(update: ClientUpdate) -> None:
    """Refuse an update that would spoil the global model.

    Raises:
        ClientFailure: if its loss, its delta or its buffers are not finite.
    """
    loss = update.metrics.get("train/loss", update.norm)
    loss_value, norm = torch.stack([loss.to(update.norm.dtype), update.norm]).tolist()
    if not math.isfinite(loss_value) and "train/loss" in update.metrics:
        raise ClientFailure(update.client_id, f"its training loss is {loss_value}")
    if not math.isfinite(norm):
        raise ClientFailure(update.client_id, "its update holds NaN or infinite values")
    if update.buffers.numel() and not bool(torch.isfinite(update.buffers).all()):
        raise ClientFailure(update.client_id, "its buffers hold NaN or infinite values")
