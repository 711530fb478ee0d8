"""A whole secure sum in one process: the real protocol, every message as its bytes.

The same clients and server could talk over a network; here a client that has dropped, or refused,
is not asked any more, and the bytes and seconds of everyone are noted.

`shortcut` has the outcome without the protocol: the same sum and the same bytes, for experiments of many
rounds. Who survives and what everyone sends follow from sets alone, and the sum is the plain one modulo R.
Nothing is protected there, nothing is even encrypted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.secure.entropy import Entropy, system_entropy
from fl_lightning.secure.protocol.client import SecureClient, UsedRounds
from fl_lightning.secure.protocol.keys import KEY_SIZE, Directory, SigningKey
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
    Graph,
    ProtocolStage,
    RefusedError,
    Session,
    neighbours,
)
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.server.protected import ProtectionCost


@dataclass(frozen=True, eq=False)
class HiddenSum:
    """How a sum of hidden vectors ended."""

    total: Any  # the sum over the survivors, shape (k,): integers of a ring, or float64
    survivors: frozenset[int]  # those whose vectors are in it
    cost: ProtectionCost


def simulate(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    dropouts: Mapping[int, ProtocolStage] | None = None,
    entropy_of: Callable[[int], Entropy] | None = None,
) -> HiddenSum:
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
    cost = no_cost(clients)
    incoming: dict[int, bytes] = dict.fromkeys(clients, b"")
    for stage in session.stages:
        for place, data in incoming.items():
            cost.bytes_down[place] += len(data)
            if first_silent.get(place, stage + 1) <= stage:
                continue
            began = time.process_time()
            try:
                answer = clients[place].receive(data) if data else clients[place].advertise()
            except RefusedError:  # with too few neighbours left; others hear nothing of it
                first_silent[place] = stage
                continue
            add_seconds(cost, "client_seconds", began)
            began = time.process_time()
            server.receive(answer)
            add_seconds(cost, "server_seconds", began)
            cost.bytes_up[place] += len(answer)
        began = time.process_time()
        incoming = server.close_stage()
        add_seconds(cost, "server_seconds", began)
    return HiddenSum(server.total, server.survivors, cost)


def no_cost(clients: Iterable[int]) -> ProtectionCost:
    """Return the cost of a sum that begins, in which clients are named that send nothing, too."""
    nothing = dict.fromkeys(clients, 0)
    return ProtectionCost(Counter(nothing), Counter(nothing))


def add_seconds(cost: ProtectionCost, purpose: str, since: float) -> None:
    """Add the CPU seconds of this process since then, see `time.process_time`."""
    cost.seconds[purpose] = cost.seconds.get(purpose, 0.0) + time.process_time() - since


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


Entries = tuple[int, ...]


def shortcut(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    dropouts: Mapping[int, ProtocolStage] | None = None,
) -> HiddenSum:
    """Return what `simulate` returns, without seconds.

    Args:
        session: what all have agreed on.
        vectors: each client's, by place; of the session's ring, shape (size,). Those of clients
            that drop before their vector is sent are not looked at.
        dropouts: the first stage at which a client is silent, by place.

    Raises:
        AbortedError: if too few clients are left.
        ValueError: if a vector or a place does not fit the session.

    Example:
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=2, threshold=3)
        >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
        >>> outcome = shortcut(session, vectors, {3: ProtocolStage.MASK})
        >>> outcome.total, outcome.cost.bytes_up[0], outcome.cost.bytes_up[3]
        (array([3, 3], dtype=uint32), 2502, 1480)
    """
    first_silent = checked_dropouts(session, dropouts or {})
    count = _Count(session, first_silent)
    survivors = count.survivors()
    total = np.zeros(session.size, session.ring.dtype)
    for place in survivors:
        if vectors[place].shape != total.shape:
            raise ValueError(
                f"vectors must have {session.size} numbers, not {vectors[place].shape}"
            )
        total += session.ring.checked(vectors[place])
    return HiddenSum(session.ring.reduced(total), survivors, count.cost)


class _Count:
    """Goes through the stages with sets of places where the protocol has messages.

    Args:
        session: what all have agreed on.
        first_silent: the first stage at which a client is silent, by place.
    """

    def __init__(self, session: Session, first_silent: Mapping[int, ProtocolStage]) -> None:
        self._session, self._first_silent = session, first_silent
        self._graph: Graph = {}
        self.cost = no_cost(range(session.num_clients))

    def survivors(self) -> Places:
        """Return whose vectors are in the sum."""
        session, least = self._session, self._session.least_survivors
        everyone = frozenset(range(session.num_clients))
        participants = self._up(
            ProtocolStage.ADVERTISE, Advertisement, dict.fromkeys(everyone, ()), least
        )
        self._graph = neighbours(participants, session.num_neighbours, session.graph_seed)
        near = {place: len(self._graph[place]) for place in participants}
        self._down(Roster, {place: (count + 1,) for place, count in near.items()})
        asked = {p: (near[p], near[p] + 1) for p in self._with_holders(participants, participants)}
        sharers = self._up(ProtocolStage.SHARE, SealedShares, asked, least)
        self._down(Mailbox, {p: (len(self._graph[p] & sharers),) * 2 for p in sharers})
        safe = self._with_holders(sharers, sharers)
        survivors = self._up(ProtocolStage.MASK, MaskedVector, dict.fromkeys(safe, ()), least)
        self._reveal(sharers, survivors)
        return survivors

    def _reveal(self, sharers: Places, survivors: Places) -> None:
        there, signatures = survivors, 0
        if self._session.active:
            self._down(Survivors, dict.fromkeys(there, ()))
            asked = dict.fromkeys(there, ())
            there = self._up(ProtocolStage.AGREE, SignedSurvivors, asked, self._session.threshold)
            signatures = self._session.threshold
        self._down(RevealRequest, dict.fromkeys(there, (signatures,)))
        shares = {
            place: (
                len(self._held(place) & survivors),
                len(self._held(place) & sharers - survivors),
            )
            for place in self._with_holders(there, survivors)
        }
        least = self._session.threshold if self._session.num_neighbours is None else 0
        told = self._up(ProtocolStage.REVEAL, RevealedShares, shares, least)
        for place in sharers:
            needed = place in survivors or bool(self._graph[place] & told)
            if needed and len(self._held(place) & told) < self._session.threshold:
                raise AbortedError(f"too few shares are left of client {place}'s secret")

    def _held(self, place: int) -> Places:
        """Return whose shares a client holds, who hold its own."""
        return self._graph[place] | {place}

    def _with_holders(self, places: Places, alive: Places) -> Places:
        """Return those who see enough others to go on."""
        least = self._session.threshold
        return frozenset(p for p in places if len(self._held(p) & alive) >= least)

    def _up(
        self,
        stage: ProtocolStage,
        kind: type[AnyMessage],
        entries: Mapping[int, Entries],
        least: int,
    ) -> Places:
        there = frozenset(p for p in entries if self._first_silent.get(p, stage + 1) > stage)
        for place in there:
            self.cost.bytes_up[place] += encoded_size(self._session, kind, *entries[place])
        if len(there) < least:
            raise AbortedError(f"{len(there)} clients answered at stage {stage.name}, not {least}")
        return there

    def _down(self, kind: type[AnyMessage], entries: Mapping[int, Entries]) -> None:
        for place, counts in entries.items():
            self.cost.bytes_down[place] += encoded_size(self._session, kind, *counts)
