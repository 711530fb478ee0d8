"""The global model on its way down to the clients: what they get, and how many bytes travel.

    x → Q_1 → Q_2 → … → bytes → x'          a client trains from x', and sends Δ = x' - y

The server keeps x and descends Δ from there, so that what rounding loses in one round is not lost
for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.client.local_training import GlobalModel
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.updates.codec import encoded_size
from fl_lightning.updates.message import Message
from fl_lightning.updates.payload import Dense, Sparse
from fl_lightning.updates.traffic import bytes_down
from fl_lightning.updates.transform import Chain, UpdateTransform


@dataclass(frozen=True)
class Sent:
    """What the clients of a round get.

    Attributes:
        model: as they have it.
        num_bytes: length of the message to one of them.
    """

    model: GlobalModel
    num_bytes: int


class Broadcast:
    """Sends models through transforms, all clients of a round the same.

    Args:
        steps: in the order in which the server applies them: quantisers, like `QSGD` or `Affine`.
        seed: the run's.

    Raises:
        ConfigurationError: for a transform that leaves numbers out: a model has none to spare.

    Example:
        >>> from fl_lightning.updates.affine import Affine
        >>> model = GlobalModel(torch.tensor([0.0, 0.3, 1.0]), torch.empty(0))
        >>> Broadcast([Affine(bits=1)], seed=0).send(model, round_index=0).model.params
        tensor([0., 0., 1.])
    """

    def __init__(self, steps: Sequence[UpdateTransform], seed: int) -> None:
        self._chain, self._seed = Chain(tuple(steps)), seed
        for step in steps:
            _refuse_what_leaves_out(step)
        self._last: tuple[int, Tensor, Sent] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is done to a model, in order."""
        return self._chain.names

    def send(self, model: GlobalModel, round_index: int) -> Sent:
        """Return what arrives of the global model of a round.

        Args:
            model: the server's, which does not change as long as the round lasts.
            round_index: the round.
        """
        if not self._chain.transforms:
            return Sent(model, bytes_down(model.params, model.buffers))
        known = self._last
        if known is None or known[0] != round_index or known[1] is not model.params:
            known = self._last = round_index, model.params, self._sent(model, round_index)
        return known[2]

    def _sent(self, model: GlobalModel, round_index: int) -> Sent:
        seed = derive_seed(self._seed, "broadcast", round_index)
        payload = self._chain.on_client(Dense(model.params), seed)
        arrived = self._chain.on_server(payload, seed, len(model.params)).to_dense()
        message = Message(
            "model",
            space="0" * 32,
            round_index=round_index,
            client_id=0,
            params=payload,
            buffers=Dense(model.buffers),
            transforms=self.names,
        )
        sent = GlobalModel(arrived.to(model.params.dtype), model.buffers)
        return Sent(sent, encoded_size(message))


def _refuse_what_leaves_out(step: UpdateTransform) -> None:
    payload = step.on_client(Dense(torch.arange(1.0, 65.0)), seed=0)
    if isinstance(payload, Sparse) or payload.size != 64:
        raise ConfigurationError(
            f"federation.download: {step.name} leaves numbers out, and clients would take them for "
            "0: use quantisers like QSGD or Affine, and keep it for federation.updates"
        )
