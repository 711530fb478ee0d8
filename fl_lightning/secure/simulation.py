"""A whole secure sum in one process: the real protocol, with every message as bytes.

Clients and server are those of a network. A client that has dropped out or refused gets no further messages, and
the bytes and seconds of every client are counted.

`shortcut` returns the same sum and numbers of bytes without the protocol, for experiments of many rounds: both
follow from the sets of clients and the plain sum modulo R. Nothing is protected or encrypted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fl_lightning.secure.entropy import Entropy, system_entropy
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.keys import KEY_SIZE
from fl_lightning.secure.protocol.messages import (
    Advertisement,
    AnyMessage,
    Mailbox,
    MaskedVector,
    Places,
    RevealedShares,
    RevealRequest,
    Roster,
    SealedShares,
    SignedSurvivors,
    Survivors,
    encoded_size,
)
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import (
    AbortedError,
    ProtocolStage,
    RefusedError,
    Session,
    neighbours,
)
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.server.protected import ProtectionCost


@dataclass(frozen=True, eq=False)
class HiddenSum:
    """Result of a secure or encrypted sum: the sum, the clients whose vectors are in it, and the cost."""

    total: Any  # sum of the survivors' vectors, shape (k,): integers of a ring, or float64
    survivors: frozenset[int]  # clients with a vector in the sum
    cost: ProtectionCost


def simulate(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    dropouts: Mapping[int, ProtocolStage] | None = None,
    entropy_of: Callable[[int], Entropy] | None = None,
) -> HiddenSum:
    """Run a secure sum, with all clients and the server in this process.

    Args:
        session: settings of the sum.
        vectors: vectors by place, of the session's ring, shape (size,).
        dropouts: first stage at which a client is silent, by place.
        entropy_of: returns the source of a client's secrets; None for the operating system.

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
    first_silent = dict(dropouts or {})
    for place, stage in first_silent.items():
        if not 0 <= place < session.num_clients or stage not in session.stages:
            raise ValueError(
                f"dropouts must be of places 0 to {session.num_clients - 1} at stages "
                f"{', '.join(each.name for each in session.stages)}, got {place} at {stage!r}"
            )
    clients, server = _parties(session, vectors, entropy_of or (lambda place: system_entropy))
    cost = no_cost(clients)
    incoming: dict[int, bytes] = dict.fromkeys(clients, b"")
    for stage in session.stages:
        for place, data in incoming.items():
            cost.bytes_down[place] += len(data)
            if first_silent.get(place, stage + 1) <= stage:
                continue
            try:
                with timed(cost, "client_seconds"):
                    answer = clients[place].receive(data) if data else clients[place].advertise()
            except RefusedError:  # with too few neighbours left: the client drops out
                first_silent[place] = stage
                continue
            with timed(cost, "server_seconds"):
                server.receive(answer)
            cost.bytes_up[place] += len(answer)
        with timed(cost, "server_seconds"):
            incoming = server.close_stage()
    return HiddenSum(server.total, server.survivors, cost)


def no_cost(clients: Iterable[int]) -> ProtectionCost:
    """Return a cost with zero bytes sent and zero bytes received for each client."""
    nothing = dict.fromkeys(clients, 0)
    return ProtectionCost(Counter(nothing), Counter(nothing))


@contextmanager
def timed(cost: ProtectionCost, purpose: str) -> Iterator[None]:
    """Context that adds the CPU seconds of its block to a cost, unless the block raises."""
    began = time.process_time()
    yield
    cost.seconds[purpose] = cost.seconds.get(purpose, 0.0) + time.process_time() - began


def _parties(
    session: Session, vectors: Mapping[int, RingIntegers], entropy_of: Callable[[int], Entropy]
) -> tuple[dict[int, SecureClient], SecureServer]:
    sources = {place: entropy_of(place) for place in sorted(vectors)}
    signing = {
        place: Ed25519PrivateKey.from_private_bytes(source(KEY_SIZE))
        for place, source in sources.items()
        if session.active
    }
    directory = {place: key.public_key().public_bytes_raw() for place, key in signing.items()}
    clients = {
        place: SecureClient(
            session,
            place,
            vectors[place],
            entropy=source,
            used={},  # each client takes part once
            signing_key=signing.get(place),
            directory=directory,
        )
        for place, source in sources.items()
    }
    return clients, SecureServer(session, directory)


def shortcut(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    missing: Collection[int] = (),
) -> HiddenSum:
    """Return the sum and the numbers of bytes that `simulate` would return, without running the protocol.

    Args:
        session: settings of the sum.
        vectors: vectors by place, of the session's ring, shape (size,); those of missing clients are
            ignored.
        missing: places of the clients that drop out at `ProtocolStage.MASK`.

    Raises:
        AbortedError: if too few clients are left.
        ValueError: if a vector does not fit the session.

    Example:
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=2, threshold=3)
        >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
        >>> outcome = shortcut(session, vectors, [3])
        >>> outcome.total, outcome.cost.bytes_up[0], outcome.cost.bytes_up[3]
        (array([3, 3], dtype=uint32), 2502, 1480)
    """
    everyone = frozenset(range(session.num_clients))
    survivors = everyone.difference(missing)
    graph = neighbours(everyone, session.num_neighbours, session.graph_seed)
    holders = {
        place: near | {place} for place, near in graph.items()
    }  # clients that hold shares of its secrets
    total = np.zeros(session.size, session.ring.dtype)
    for place in survivors:
        if vectors[place].shape != total.shape:
            raise ValueError(
                f"vectors must have {session.size} numbers, not {vectors[place].shape}"
            )
        total += session.ring.checked(vectors[place])
    if len(survivors) < session.least_survivors:
        raise AbortedError(f"{len(survivors)} clients of {session.least_survivors} are left")
    # the other clients have too few neighbours left and refuse
    told = {p for p in survivors if len(holders[p] & survivors) >= session.threshold}
    for place, own in holders.items():
        is_needed = place in survivors or graph[place] & told
        if is_needed and len(own & told) < session.threshold:
            raise AbortedError(f"too few shares are left of client {place}'s secret")
    cost = no_cost(everyone)
    for place, own in holders.items():
        up, down = _messages_of(session, own, is_there=place in survivors)
        if place in told:
            up.append((RevealedShares, len(own & survivors), len(own - survivors)))
        cost.bytes_up[place] = sum(encoded_size(session, *each) for each in up)
        cost.bytes_down[place] = sum(encoded_size(session, *each) for each in down)
    return HiddenSum(session.ring.reduced(total), survivors, cost)


# a kind of message, and the number of entries of each table
Sized = tuple[type[AnyMessage], *tuple[int, ...]]


def _messages_of(
    session: Session, holders: Places, *, is_there: bool
) -> tuple[list[Sized], list[Sized]]:
    """Return the kinds and sizes of messages that a client sends and receives before it reveals shares."""
    near = len(holders) - 1
    up: list[Sized] = [(Advertisement,), (SealedShares, near, near + 1)]
    down: list[Sized] = [(Roster, near + 1), (Mailbox, near, near)]
    if is_there:
        up.append((MaskedVector,))
        if session.active:
            down.append((Survivors,))
            up.append((SignedSurvivors,))
        down.append((RevealRequest, session.threshold if session.active else 0))
    return up, down
