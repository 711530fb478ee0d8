"""Compressed transport between clients and server: the arriving vector, and the length of its message.

Upload of an update:

    Δ → T_1 → T_2 → … → bytes → … → T_2⁻¹ → T_1⁻¹ → Δ'

In a simulation indices and codes are packed, but no message is written; the number of bytes is that of
the real message. With error feedback a client keeps the compression error and adds it to the next update.

Download of the global model:

    x → Q_1 → Q_2 → … → bytes → x'          a client trains from x', and sends Δ = x' - y

The server keeps x and applies Δ to it, so a rounding error of one round does not carry over to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.message import Message, bytes_down, bytes_up, encoded_size
from fl_lightning.updates.payload import Dense, Payload, Sparse
from fl_lightning.updates.transform import (
    Chain,
    ErrorFeedback,
    Shapes,
    Transform,
    UpdateStep,
    with_memory,
)

OF_DOWNLOAD = Traits(
    needs={
        Trait.COHORTS: "quantises one global model per round",
        Trait.ONE_MASK: "sends all clients the same coordinates",
    },
    instead={
        Trait.COHORTS: "leave download out",
        Trait.ONE_MASK: "leave download out, or use one mask for all",
    },
)

# An entry of a federation's `updates`.
Step = Transform | ErrorFeedback


@dataclass(frozen=True)
class Arrival:
    """An update as the server decodes it, with the message's length in bytes and the compression error."""

    update: ClientUpdate  # update with the delta that the server reads
    num_bytes: int  # length of the message
    error: Tensor  # ‖Δ' - Δ‖ / ‖Δ‖, a scalar; 0 if both are 0
    # the client's memory for its next round, shape (k,); None without error feedback
    memory: Tensor | None = None
    payload: Payload | None = None  # compressed delta; None for the delta itself


class _Way:
    """Base of upload and download: compression by transforms with random numbers that both sides can draw.

    Attributes:
        is_empty: whether there is no transform, so that vectors arrive unchanged.
    """

    def __init__(self, seed: int, first: Chain, last: Chain) -> None:
        self._seed = seed
        self._unplaced = self._first, self._last = first, last
        self.is_empty = not (first.transforms or last.transforms)

    def place(self, shapes: Shapes) -> None:
        """Tell the transforms the shapes of the tensors that are concatenated in the sent vectors.

        Args:
            shapes: shapes in order, see `Space.shapes`.
        """
        self._first, self._last = (chain.with_shapes(shapes) for chain in self._unplaced)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the transforms, in the order in which the message's header lists them."""
        return self._first.names + self._last.names

    def num_sent(self, size: int) -> int:
        """Return how many values are sent for a vector of ``size`` numbers."""
        return self._last.sent_size(self._first.sent_size(size))

    def _arrived(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """Decode a payload as the receiver does, into a vector with the shape and dtype of ``like``."""
        payload = self._last.on_server(payload, seed, self._first.sent_size(len(like)))
        arrived = self._first.on_server(payload, seed, len(like)).to_dense()
        return arrived if self.is_empty else arrived.to(like.dtype)


class UpdatePath(_Way):
    """Upload: compresses a client's update by transforms, and decodes it as the server does.

    Args:
        steps: transforms in the order in which a client applies them; an `ErrorFeedback` must be the last.
        seed: seed of the run.

    Raises:
        ConfigurationError: if a step follows an error feedback, or a transform cannot follow another.

    Attributes:
        has_memory: whether clients keep a memory, for error feedback.

    Example:
        >>> from fl_lightning.updates.sparsifiers import TopK
        >>> path = UpdatePath([ErrorFeedback([TopK(0.5)])], seed=0)
        >>> update = ClientUpdate(7, torch.tensor([3.0, 4.0]), torch.empty(0), 10, 1)
        >>> arrival = path.send(update, round_index=0, memory=None)
        >>> arrival.update.delta, arrival.memory, round(float(arrival.error), 6)
        (tensor([0., 4.]), tensor([3., 0.]), 0.6)
    """

    def __init__(self, steps: Sequence[Step], seed: int) -> None:
        feedbacks = [step for step in steps if isinstance(step, ErrorFeedback)]
        if feedbacks and steps[-1] is not feedbacks[0]:
            raise ConfigurationError(
                "federation.updates: one ErrorFeedback is allowed, as the last entry, because it does not see the "
                "errors of transforms that follow it: put those transforms inside it"
            )
        before = Chain(tuple(step for step in steps if isinstance(step, Transform)))
        super().__init__(seed, before, Chain(feedbacks[0].parts if feedbacks else ()))
        self.has_memory = bool(feedbacks)
        _check_order(steps)

    def send(self, update: ClientUpdate, round_index: int, memory: Tensor | None) -> Arrival:
        """Compress an update, and return it as the server decodes it, with its length in bytes and its error.

        Coordinates that a client's own mask freezes are not sent.

        Args:
            update: the client's update.
            round_index: number of the round.
            memory: the client's memory from its last round, shape (k,), or None.
        """
        if self.is_empty:
            return Arrival(update, bytes_up(update), torch.zeros(()))
        active, seed = update.active, self._seed_of(round_index, update.client_id)
        delta = update.delta if active is None else update.delta[active]
        kept = memory if active is None or memory is None else memory[active]
        payload = self._first.on_client(Dense(delta), seed)
        if self.has_memory:
            payload, kept = with_memory(self._last, payload.to_dense(), kept, seed)
        arrived = self._arrived(payload, delta, seed)
        message = Message.of_update(
            update, space="0" * 32, round_index=round_index, params=payload, transforms=self.names
        )
        if active is not None:
            arrived = torch.zeros_like(update.delta).masked_scatter_(active, arrived)
            if kept is not None:
                before = torch.zeros_like(update.delta) if memory is None else memory
                kept = before.masked_scatter(active, kept)
        return Arrival(
            replace(update, delta=arrived),
            encoded_size(message),
            _relative_error(arrived, update.delta),
            kept,
            payload,
        )

    def opened(self, payload: Payload, *, round_index: int, client_id: int, like: Tensor) -> Tensor:
        """Decode a payload into the delta that the server reads, bit-identical to that of `send`.

        Args:
            payload: payload from the client.
            round_index: number of the round.
            client_id: id of the client.
            like: a tensor with the delta's shape (k,), dtype and device.
        """
        return self._arrived(payload, like, self._seed_of(round_index, client_id))

    def _seed_of(self, round_index: int, client_id: int) -> int:
        return derive_seed(self._seed, "update", round_index, client_id)

    def typical_bytes(self, like: Tensor, num_buffers: int = 0) -> int:
        """Return the approximate length in bytes of a client's compressed update message, without metrics.

        Args:
            like: a tensor with the delta's shape (k,), dtype and device; its values are random draws.
            num_buffers: number of values in the model's floating-point buffers.
        """
        delta = like
        if not self.is_empty:  # else only its size counts
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "typical update"))
            delta = torch.randn(like.shape, generator=generator).to(like)
        update = ClientUpdate(0, delta, like.new_zeros(num_buffers), 1, 1)
        return self.send(update, 0, None).num_bytes


def _check_order(steps: Sequence[UpdateStep]) -> None:
    """Raise ConfigurationError if a transform cannot follow another, found by compressing a small vector."""
    chain = Chain(tuple(part for step in steps for part in step.parts))
    try:
        chain.with_shapes(((8, 8),)).on_client(Dense(torch.arange(1.0, 65.0)), seed=0)
    except ValueError as error:
        raise ConfigurationError(f"federation.updates: {error}") from None


def _relative_error(arrived: Tensor, sent: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(sent)
    error: Tensor = torch.linalg.vector_norm(arrived - sent)
    return error / torch.where(norm > 0, norm, 1.0)


class SentModel(NamedTuple):
    """The global model as the clients of a round decode it, with the message's length in bytes."""

    params: Tensor  # parameters that clients read, shape (k,)
    num_bytes: int  # length of the message to one client
    payload: Payload | None = None  # compressed parameters; None for the parameters themselves


class Broadcast(_Way):
    """Download: compresses the global model by transforms; all clients of a round decode the same model.

    Args:
        steps: quantisers, like `QSGD` or `Affine`, in the order in which the server applies them.
        seed: seed of the run.

    Raises:
        ConfigurationError: for a transform that drops numbers, because clients need the whole model.

    Example:
        >>> from fl_lightning.updates.quantisers import Affine
        >>> params, buffers = torch.tensor([0.0, 0.3, 1.0]), torch.empty(0)
        >>> Broadcast([Affine(bits=1)], seed=0).send(params, buffers, round_index=0).params
        tensor([0., 0., 1.])
    """

    def __init__(self, steps: Sequence[Transform], seed: int) -> None:
        super().__init__(seed, Chain(tuple(steps)), Chain())
        for step in steps:
            _refuse_what_leaves_out(step)
        self._known: tuple[int, Tensor, SentModel] | None = None

    @override
    def place(self, shapes: Shapes) -> None:
        super().place(shapes)
        self._known = None

    def send(self, params: Tensor, buffers: Tensor, round_index: int) -> SentModel:
        """Compress the global model of a round, and return it as the clients decode it.

        Args:
            params: the server's parameters, constant during the round, shape (k,).
            buffers: floating-point buffers, which arrive unchanged, shape (b,).
            round_index: number of the round.
        """
        if self.is_empty:
            return SentModel(params, bytes_down(params, buffers))
        known = self._known
        if known is None or known[0] != round_index or known[1] is not params:
            sent = self._sent(params, buffers, round_index)
            known = self._known = round_index, params, sent
        return known[2]

    def _sent(self, params: Tensor, buffers: Tensor, round_index: int) -> SentModel:
        seed = derive_seed(self._seed, "broadcast", round_index)
        payload = self._first.on_client(Dense(params), seed)
        message = Message(
            "model",
            space="0" * 32,
            round_index=round_index,
            client_id=0,
            params=payload,
            buffers=Dense(buffers),
            transforms=self.names,
        )
        arrived = self.opened(payload, round_index, params)
        return SentModel(arrived, encoded_size(message), payload)

    def opened(self, payload: Payload, round_index: int, like: Tensor) -> Tensor:
        """Decode a payload into the parameters that clients read, bit-identical to those of `send`.

        Args:
            payload: payload from the server.
            round_index: number of the round.
            like: a tensor with the parameters' shape (k,) and dtype.
        """
        return self._arrived(payload, like, derive_seed(self._seed, "broadcast", round_index))


def _refuse_what_leaves_out(step: Transform) -> None:
    if step.approximates:
        raise ConfigurationError(
            f"federation.download: {step.name} loses more than the rounding of each number, and there is no "
            "error feedback for models: use a quantiser, like QSGD or Affine"
        )
    payload = step.with_shapes(((8, 8),)).on_client(Dense(torch.arange(1.0, 65.0)), seed=0)
    if isinstance(payload, Sparse) or payload.size != 64:
        raise ConfigurationError(
            f"federation.download: {step.name} leaves numbers out, which clients would read as 0: use a "
            "quantiser, like QSGD or Affine"
        )
