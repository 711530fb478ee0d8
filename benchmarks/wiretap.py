"""What whoever listens to one client sees of its update, with and without protection.

Everything goes through the real messages: an update is encoded, the bytes are read, and what the
format says is made of them again. The listener knows the model, the protocol and what compression
draws, but no key and no noise, which here comes from a seed so that results repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data.cohorts.cohort import AllClients
from fl_lightning.privacy.distributed import LocalDP
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import clipped
from fl_lightning.secure.encryption.ckks import CKKSClient, generate_keys
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.messages import MaskedVector
from fl_lightning.secure.protocol.messages import decode as decode_secure
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import ProtocolStage, Session
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.secure.secure_sum import SecureSum
from fl_lightning.secure.sum_quantiser import SumQuantiser
from fl_lightning.updates.message import Agreement, Message, decode, encode
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.transform import Chain, Shapes, Transform

SPACE = "0" * 32
Tap = Callable[[Sequence[Tensor], int], Tensor]  # every client's delta, whose message -> as seen


@dataclass(frozen=True)
class Compressed:
    """The message of a client: what transforms make of its delta, none for a plain message."""

    transforms: tuple[Transform, ...]
    shapes: Shapes

    def __call__(self, deltas: Sequence[Tensor], client: int) -> Tensor:
        """Return what the message says."""
        chain = Chain(self.transforms).with_shapes(self.shapes)
        delta, seed = deltas[client], derive_seed(0, "update", client)
        update = ClientUpdate(client, delta, delta[:0], 1, 1)
        message = Message.of_update(
            update,
            space=SPACE,
            round_index=0,
            params=chain.on_client(Dense(delta), seed),
            transforms=chain.names,
        )
        agreement = Agreement(
            kind="update",
            space=SPACE,
            round_index=0,
            num_params=chain.sent_size(len(delta)),
            transforms=chain.names,
        )
        params = decode(encode(message), agreement).params
        return chain.on_server(params, seed, len(delta)).to_dense()


@dataclass(frozen=True)
class Noisy:
    """The message of a client under `LocalDP`, which clips and adds noise before it sends."""

    noise_multiplier: float
    clip_norm: float = 0.1

    @property
    def epsilon(self) -> float:
        """What one such message costs, at δ = 1e-5."""
        return self._mechanism(1).epsilon(rounds=1)

    def __call__(self, deltas: Sequence[Tensor], client: int) -> Tensor:
        """Return what the message says."""
        release = self._mechanism(len(deltas)).client_release(0, self.clip_norm)
        assert release is not None
        return release(clipped(deltas[client], self.clip_norm)[0], client)

    def _mechanism(self, num_clients: int) -> Mechanism[Any]:
        privacy = LocalDP(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        run = AccountedRun(AllClients(), num_clients=num_clients, num_rounds=1, seed=0)
        mechanism: Mechanism[Any] = privacy.mechanism(run, NoiseSource(0))
        return mechanism


class Masked:
    """The message of a client in a secure sum of everybody; one session for all that is asked."""

    def __init__(self) -> None:
        self._heard: tuple[Sequence[Tensor], list[Tensor]] = ((), [])

    def __call__(self, deltas: Sequence[Tensor], client: int) -> Tensor:
        """Return the integers of the message, as the numbers that they stand for."""
        if self._heard[0] is not deltas:
            self._heard = deltas, _masked(deltas)
        return self._heard[1][client]


class Summed:
    """What the server of a secure sum learns, and all that it learns: the sum of everybody."""

    def __call__(self, deltas: Sequence[Tensor], client: int) -> Tensor:
        """Return the sum."""
        return torch.stack(list(deltas)).sum(0)


class Encrypted:
    """The message of a client with CKKS: its last bytes, each as a number, for want of better."""

    def __call__(self, deltas: Sequence[Tensor], client: int) -> Tensor:
        """Return them, from -1 to 1."""
        update, _ = self._client(len(deltas[client])).encrypt(deltas[client])
        data = np.frombuffer(b"".join(update.ciphertexts), np.uint8)[-len(deltas[client]) :]
        return torch.from_numpy(data.astype(np.float32)) / 127.5 - 1

    @lru_cache(maxsize=1)  # noqa: B019 - there is one
    def _client(self, size: int) -> CKKSClient:
        layout = CKKSLayout(size)
        return CKKSClient(layout, generate_keys(layout.parameters))


def _masked(deltas: Sequence[Tensor]) -> list[Tensor]:
    quantiser = SumQuantiser(num_clients=len(deltas), clip=1.0, levels=2**24)
    draw = np.random.default_rng(0).random
    vectors = [quantiser.encode(delta, 1, draw) for delta in deltas]
    session = SecureSum(run="wiretap").session(len(deltas), size=len(vectors[0]))
    heard = []
    for data in masked_messages(session, vectors):
        _, message = decode_secure(session, data, MaskedVector)
        # behind the numbers stand the examples and the checksum
        levels = message.values[: len(deltas[0])].astype(np.float64)
        heard.append(torch.from_numpy(levels * quantiser.step - quantiser.clip).float())
    return heard


def masked_messages(session: Session, vectors: Sequence[RingIntegers]) -> list[bytes]:
    """Return the bytes with which each client sends its vector, pads and all."""
    clients = [
        SecureClient(session, place, vector, used={}) for place, vector in enumerate(vectors)
    ]
    server = SecureServer(session)
    answers = [client.advertise() for client in clients]
    for stage in session.stages:
        if stage == ProtocolStage.MASK:
            break
        for answer in answers:
            server.receive(answer)
        incoming = server.close_stage()
        answers = [client.receive(incoming[place]) for place, client in enumerate(clients)]
    return answers
