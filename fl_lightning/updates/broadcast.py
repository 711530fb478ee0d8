"""The global model on its way down to the clients: what they get, and how many bytes travel.

    x → Q_1 → Q_2 → … → bytes → x'          a client trains from x', and sends Δ = x' - y

The server keeps x and descends Δ from there, so that what rounding loses in one round is not lost
for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.updates.payload import Dense, Payload, Sparse
from fl_lightning.updates.transform import Chain, Shapes, Transform, UpdateTransform, as_transform
from fl_lightning.updates.wire.codec import encoded_size
from fl_lightning.updates.wire.message import Message
from fl_lightning.updates.wire.traffic import bytes_down


class SentModel(NamedTuple):
    """What the clients of a round get.

    Attributes:
        params: of the global model as they have it, shape (k,).
        num_bytes: length of the message to one of them.
        payload: what they travel as; None for the params themselves.
    """

    params: Tensor
    num_bytes: int
    payload: Payload | None = None


class Broadcast:
    """Sends models through transforms, all clients of a round the same.

    Args:
        steps: in the order in which the server applies them: quantisers, like `QSGD` or `Affine`.
        seed: the run's.

    Raises:
        ConfigurationError: for a transform that leaves numbers out: a model has none to spare.

    Example:
        >>> from fl_lightning.updates.affine import Affine
        >>> params, buffers = torch.tensor([0.0, 0.3, 1.0]), torch.empty(0)
        >>> Broadcast([Affine(bits=1)], seed=0).send(params, buffers, round_index=0).params
        tensor([0., 0., 1.])
    """

    def __init__(self, steps: Sequence[UpdateTransform], seed: int) -> None:
        self._chain = self._unplaced = Chain(tuple(steps))
        self._seed = seed
        for step in steps:
            _refuse_what_leaves_out(as_transform(step))
        self._last: tuple[int, Tensor, SentModel] | None = None

    def place(self, shapes: Shapes) -> None:
        """Learn which tensors make the vectors that are sent from here on, as `UpdatePath`."""
        self._chain, self._last = self._unplaced.with_shapes(shapes), None

    @property
    def names(self) -> tuple[str, ...]:
        """What is done to a model, in order."""
        return self._chain.names

    def send(self, params: Tensor, buffers: Tensor, round_index: int) -> SentModel:
        """Return what arrives of the global model of a round.

        Args:
            params: the server's, which do not change as long as the round lasts, shape (k,).
            buffers: its floating-point buffers, which arrive as they are, shape (b,).
            round_index: the round.
        """
        if not self._chain.transforms:
            return SentModel(params, bytes_down(params, buffers))
        known = self._last
        if known is None or known[0] != round_index or known[1] is not params:
            sent = self._sent(params, buffers, round_index)
            known = self._last = round_index, params, sent
        return known[2]

    def _sent(self, params: Tensor, buffers: Tensor, round_index: int) -> SentModel:
        seed = derive_seed(self._seed, "broadcast", round_index)
        payload = self._chain.on_client(Dense(params), seed)
        arrived = self.opened(payload, round_index, params)
        message = Message(
            "model",
            space="0" * 32,
            round_index=round_index,
            client_id=0,
            params=payload,
            buffers=Dense(buffers),
            transforms=self.names,
        )
        return SentModel(arrived, encoded_size(message), payload)

    def opened(self, payload: Payload, round_index: int, like: Tensor) -> Tensor:
        """Return what clients take a payload for, to the bit as `send` says it.

        Args:
            payload: from the server.
            round_index: the round.
            like: of the params' shape (k,) and dtype.
        """
        if not self._chain.transforms:
            return payload.to_dense()
        seed = derive_seed(self._seed, "broadcast", round_index)
        return self._chain.on_server(payload, seed, len(like)).to_dense().to(like.dtype)

    def num_sent(self, size: int) -> int:
        """Return how many numbers the payload of so many stands for."""
        return self._chain.sent_size(size)


def _refuse_what_leaves_out(step: Transform) -> None:
    if step.approximates:
        raise ConfigurationError(
            f"federation.download: {step.name} approximates, and a model has no memory that makes up "
            "for it: use quantisers like QSGD or Affine, and keep it for federation.updates"
        )
    payload = step.with_shapes(((8, 8),)).on_client(Dense(torch.arange(1.0, 65.0)), seed=0)
    if isinstance(payload, Sparse) or payload.size != 64:
        raise ConfigurationError(
            f"federation.download: {step.name} leaves numbers out, and clients would take them for "
            "0: use quantisers like QSGD or Affine, and keep it for federation.updates"
        )
