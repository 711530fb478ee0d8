"""The outcome of a secure sum without its protocol: the same sum, the same bytes, estimated seconds.

For experiments of many rounds: who survives and what everyone sends follow from sets alone, and
the sum is the plain one modulo R. Nothing is protected here, nothing is even encrypted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fl_lightning.secure.protocol.graph import Graph, neighbours
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
)
from fl_lightning.secure.protocol.session import AbortedError, ProtocolStage, Session
from fl_lightning.secure.protocol.wire import encoded_size
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.secure.simulation import Costs, SumOutcome, checked_dropouts
from fl_lightning.secure.unit_seconds import UnitSeconds

Entries = tuple[int, ...]


def shortcut(
    session: Session,
    vectors: Mapping[int, RingIntegers],
    dropouts: Mapping[int, ProtocolStage] | None = None,
    unit_seconds: UnitSeconds | None = None,
) -> SumOutcome:
    """Return what `simulate` returns, its seconds estimated.

    Args:
        session: what all have agreed on.
        vectors: each client's, by place; of the session's ring, shape (size,). Those of clients
            that drop before their vector is sent are not looked at.
        dropouts: the first stage at which a client is silent, by place.
        unit_seconds: what the seconds are made of; None for none.

    Raises:
        AbortedError: if too few clients are left.
        ValueError: if a vector or a place does not fit the session.

    Example:
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=2, threshold=3)
        >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
        >>> outcome = shortcut(session, vectors, {3: ProtocolStage.MASK})
        >>> outcome.total, outcome.costs.bytes_up[0], outcome.costs.bytes_up[3]
        (array([3, 3], dtype=uint32), 838, 580)
    """
    first_silent = checked_dropouts(session, dropouts or {})
    count = _Count(session, first_silent, unit_seconds or UnitSeconds())
    survivors = count.survivors()
    total = np.zeros(session.size, session.ring.dtype)
    for place in survivors:
        if vectors[place].shape != total.shape:
            raise ValueError(
                f"vectors must have {session.size} numbers, not {vectors[place].shape}"
            )
        total += session.ring.checked(vectors[place])
    return SumOutcome(session.ring.reduced(total), survivors, count.costs)


class _Count:
    """Goes through the stages with sets of places where the protocol has messages.

    Args:
        session: what all have agreed on.
        first_silent: the first stage at which a client is silent, by place.
        unit: what seconds are made of.
    """

    def __init__(
        self, session: Session, first_silent: Mapping[int, ProtocolStage], unit: UnitSeconds
    ) -> None:
        self._session, self._first_silent, self._unit = session, first_silent, unit
        self._graph: Graph = {}
        everyone = range(session.num_clients)
        self.costs = Costs(dict.fromkeys(everyone, 0), dict.fromkeys(everyone, 0))

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
        self._add_seconds(participants, sharers, survivors)
        if session.active:
            self._add_signatures(len(participants), len(survivors))
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
            size = encoded_size(self._session, kind, *entries[place])
            self.costs.bytes_up[place] += size
            self.costs.client_seconds += size * self._unit.message_byte
            self.costs.server_seconds += size * self._unit.message_byte
        if len(there) < least:
            raise AbortedError(f"{len(there)} clients answered at stage {stage.name}, not {least}")
        return there

    def _down(self, kind: type[AnyMessage], entries: Mapping[int, Entries]) -> None:
        for place, counts in entries.items():
            self.costs.bytes_down[place] += encoded_size(self._session, kind, *counts)

    def _add_seconds(self, participants: Places, sharers: Places, survivors: Places) -> None:
        session, unit = self._session, self._unit
        pad = session.size * session.ring.dtype.itemsize * unit.pad_byte
        near = sum(len(self._graph[place]) for place in sharers)
        boxes = sum(len(self._graph[place] & sharers) for place in survivors)
        self.costs.client_seconds += 2 * len(participants) * unit.agreement
        self.costs.client_seconds += near * (unit.agreement + unit.box)
        self.costs.client_seconds += 2 * near * session.threshold * unit.share_term
        self.costs.client_seconds += boxes * (unit.agreement + unit.box + pad)
        self.costs.client_seconds += len(survivors) * pad
        lost = sum(len(self._graph[place] & survivors) for place in sharers - survivors)
        self.costs.server_seconds += len(survivors) * pad + lost * (unit.agreement + pad)
        self.costs.server_seconds += len(sharers) * session.threshold**2 * unit.share_term

    def _add_signatures(self, participants: int, survivors: int) -> None:
        signed, unit = participants + survivors, self._unit
        checked = participants**2 + survivors * self._session.threshold
        self.costs.client_seconds += signed * unit.signature + checked * unit.verification
        self.costs.server_seconds += signed * unit.verification
