"""A whole secure sum in one process: the real protocol, every message as its bytes.

The same clients and server could talk over a network; here a client that has dropped, or refused,
is not asked any more, and the bytes and seconds of everyone are noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_lightning.secure.entropy import Entropy, system_entropy
from fl_lightning.secure.protocol.client import SecureClient, UsedRounds
from fl_lightning.secure.protocol.keys import KEY_SIZE, Directory, SigningKey
from fl_lightning.secure.protocol.messages import Places
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import ProtocolStage, RefusedError, Session
from fl_lightning.secure.ring import RingIntegers


@dataclass
class Costs:
    """Costs of a secure sum.

    Attributes:
        bytes_up: sent by each client, by place.
        bytes_down: received by each client, by place.
        client_seconds: of all clients together, of CPU time.
        server_seconds: of CPU time.
    """

    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    client_seconds: float = 0.0
    server_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class SumOutcome:
    """How a secure sum ended.

    Attributes:
        total: the sum modulo R over the survivors, of the ring's dtype, shape (size,).
        survivors: places of those whose vectors are in it.
        costs: bytes and seconds.
    """

    total: RingIntegers
    survivors: Places
    costs: Costs


def simulate(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    dropouts: Mapping[int, ProtocolStage] | None = None,
    entropy_of: Callable[[int], Entropy] | None = None,
) -> SumOutcome:
    """Run a secure sum.

    Args:
        session: what all have agreed on.
        vectors: each client's, by place; of the session's ring, shape (size,).
        dropouts: the first stage at which a client is silent, by place.
        entropy_of: where a client's secrets come from; None for the operating system.

    Raises:
        AbortedError: if too few clients are left.
        ValueError: if a vector or a place does not fit the session.

    Example:
        >>> import numpy as np
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=2, threshold=3)
        >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
        >>> outcome = simulate(session, vectors, {3: ProtocolStage.MASK})
        >>> outcome.total, sorted(outcome.survivors)
        (array([3, 3], dtype=uint32), [0, 1, 2])
        >>> simulate(session, vectors, {2: ProtocolStage.SHARE, 3: ProtocolStage.MASK})
        Traceback (most recent call last):
        ...
        fl_lightning.secure.protocol.session.AbortedError: 2 clients answered at stage MASK, at \
least 3 must: have more clients in a cohort, a longer time to answer, or a lower threshold
    """
    if sorted(vectors) != list(range(session.num_clients)):
        raise ValueError(f"vectors must be of places 0 to {session.num_clients - 1}")
    first_silent = checked_dropouts(session, dropouts or {})
    clients, server = _parties(session, vectors, entropy_of or (lambda place: system_entropy))
    costs = Costs(dict.fromkeys(clients, 0), dict.fromkeys(clients, 0))
    incoming: dict[int, bytes] = dict.fromkeys(clients, b"")
    for stage in session.stages:
        for place, data in incoming.items():
            costs.bytes_down[place] += len(data)
            if first_silent.get(place, stage + 1) <= stage:
                continue
            began = time.process_time()
            try:
                answer = clients[place].receive(data) if data else clients[place].advertise()
            except RefusedError:  # with too few neighbours left; others hear nothing of it
                first_silent[place] = stage
                continue
            answered = time.process_time()
            server.receive(answer)
            costs.bytes_up[place] += len(answer)
            costs.client_seconds += answered - began
            costs.server_seconds += time.process_time() - answered
        began = time.process_time()
        incoming = server.close_stage()
        costs.server_seconds += time.process_time() - began
    return SumOutcome(server.total, server.survivors, costs)


def checked_dropouts(
    session: Session, dropouts: Mapping[int, ProtocolStage]
) -> dict[int, ProtocolStage]:
    """Return a copy.

    Raises:
        ValueError: if a place or a stage is not one of the session's.
    """
    for place, stage in dropouts.items():
        if not 0 <= place < session.num_clients or stage not in session.stages:
            raise ValueError(
                f"dropouts must be of places 0 to {session.num_clients - 1} at stages "
                f"{', '.join(each.name for each in session.stages)}, got {place} at {stage!r}"
            )
    return dict(dropouts)


def _parties(
    session: Session, vectors: Mapping[int, RingIntegers], entropy_of: Callable[[int], Entropy]
) -> tuple[dict[int, SecureClient], SecureServer]:
    sources = {place: entropy_of(place) for place in sorted(vectors)}
    signing, directory = {}, None
    if session.active:
        signing = {place: SigningKey(source(KEY_SIZE)) for place, source in sources.items()}
        directory = Directory({place: key.public for place, key in signing.items()})
    clients = {
        place: SecureClient(
            session,
            place,
            vectors[place],
            entropy=source,
            used=UsedRounds(),  # of clients that take part once
            signing_key=signing.get(place),
            directory=directory,
        )
        for place, source in sources.items()
    }
    return clients, SecureServer(session, directory)
