"""The outcome of a secure sum without its protocol: the same sum, the same bytes, estimated seconds.

For experiments of many rounds: who survives and what everyone sends follow from sets alone, and
the sum is the plain one modulo R. Nothing is protected here, nothing is even encrypted.

What a secure sum's seconds are made of on this machine, measured in CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from fl_lightning.core.container import as_tensor, bytes_of, read, write
from fl_lightning.secure.entropy import system_entropy
from fl_lightning.secure.protocol.keys import (
    AgreementKey,
    SigningKey,
    add_pad,
    check_signature,
    seal,
)
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
from fl_lightning.secure.protocol.session import (
    AbortedError,
    Graph,
    ProtocolStage,
    Session,
    neighbours,
)
from fl_lightning.secure.protocol.shamir import split
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.simulation import Costs, SumOutcome, checked_dropouts

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
        (array([3, 3], dtype=uint32), 2502, 1480)
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
            self._add_message(size)
        if len(there) < least:
            raise AbortedError(f"{len(there)} clients answered at stage {stage.name}, not {least}")
        return there

    def _down(self, kind: type[AnyMessage], entries: Mapping[int, Entries]) -> None:
        for place, counts in entries.items():
            size = encoded_size(self._session, kind, *counts)
            self.costs.bytes_down[place] += size
            self._add_message(size)

    def _add_message(self, size: int) -> None:
        """Add the seconds of a message, which one side writes and the other reads."""
        seconds = self._unit.message + size * self._unit.message_byte
        self.costs.client_seconds += seconds
        self.costs.server_seconds += seconds

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


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one thread.

    Attributes:
        agreement: of one key agreement with its derivation.
        box: of sealing or opening the shares for one neighbour.
        share_term: of one share, per unit of the threshold.
        pad_byte: of adding one byte of a pad.
        message: of writing or reading a message, whatever its length.
        message_byte: of writing or reading one byte of a message.
        signature: of making a signature.
        verification: of checking one.

    Example:
        >>> measured = UnitSeconds.measured(repetitions=1)
        >>> 0 < measured.pad_byte < measured.agreement
        True
    """

    agreement: float = 0.0
    box: float = 0.0
    share_term: float = 0.0
    pad_byte: float = 0.0
    message: float = 0.0
    message_byte: float = 0.0
    signature: float = 0.0
    verification: float = 0.0

    @classmethod
    def measured(cls, repetitions: int = 5) -> UnitSeconds:
        """Return this machine's; takes some 20 ms a repetition."""
        ring, key, peer = Ring(32), AgreementKey(bytes(range(32))), AgreementKey(b"peer" * 8)
        total = np.zeros(1 << 18, ring.dtype)
        sign, verify = _signing()

        def agree() -> None:
            for _ in range(20):
                key.secret_with(peer.public, "pads", b"context", me=0, peer=1)

        def box() -> None:
            for _ in range(100):
                seal(b"k" * 32, b"s" * 66, b"context", sender=0, receiver=1)

        def share() -> None:
            split(b"s" * 32, range(1, 41), 20, system_entropy)

        def pack() -> None:
            data = write("MaskedVector", {}, {"values": as_tensor(ring.pack(total))})
            _, tensors = read(data, "MaskedVector")
            ring.unpack(bytes_of(tensors["values"]), len(total))

        return cls(
            agreement=_seconds(repetitions, agree) / 20,
            box=_seconds(repetitions, box) / 100,
            share_term=_seconds(repetitions, share) / (40 * 20),
            pad_byte=_seconds(repetitions, lambda: add_pad(total, b"k" * 32, ring)) / total.nbytes,
            message=_seconds(repetitions, _messages) / 20,
            message_byte=_seconds(repetitions, pack) / total.nbytes / 2,
            signature=_seconds(repetitions, sign) / 10,
            verification=_seconds(repetitions, verify) / 10,
        )


def _messages() -> None:
    """Write and read ten short messages."""
    for _ in range(10):
        tensors = {"client": torch.tensor(0), "keys": torch.zeros(1, 64)}
        read(write("Roster", {"session": "0" * 64}, tensors), "Roster")


def _signing() -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what makes ten signatures, and what checks ten."""
    key = SigningKey(b"sign" * 8)
    public, signature = key.public, key.sign(b"content")

    def sign() -> None:
        for _ in range(10):
            key.sign(b"content")

    def verify() -> None:
        for _ in range(10):
            check_signature(public, signature, b"content", "it")

    return sign, verify


def _seconds(repetitions: int, call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(repetitions):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return median(times)
