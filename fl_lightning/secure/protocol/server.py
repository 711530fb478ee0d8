"""The server of a secure sum, which learns only the sum and its clients.

    in each stage: receive messages until the stage is closed; silent clients have dropped out

    Σ_u x_u = Σ_u y_u - Σ_u pad(b_u) - Σ_v Σ_u ± pad(s_uv)     u: survivors, v: those who dropped

Shares of the secrets behind pads allow the server to remove the pads. Sources: Bonawitz et al. 2017, figure 4; Bell et al.
2020, algorithm 2. Differs: no client is trusted. Every share is compared with the hash of its dealer, every secret
with the commitment to the seed or the advertised key, the sum with its checksum. A difference ends the session,
and the error names the liar if that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.protocol.keys import KEY_SIZE, AgreementKey, Signatures, add_pad
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
    Table,
    decode,
    encode,
    places_as_bits,
)
from fl_lightning.secure.protocol.session import (
    AbortedError,
    Graph,
    ProtocolStage,
    Session,
    neighbours,
)
from fl_lightning.secure.protocol.shamir import (
    SHARE_HASH_SIZE,
    combine,
    seed_commitment,
    seed_pad_key,
    share_hash,
)
from fl_lightning.secure.ring import RingIntegers, has_checksum

_KINDS: dict[ProtocolStage, type[Any]] = {
    ProtocolStage.ADVERTISE: Advertisement,
    ProtocolStage.SHARE: SealedShares,
    ProtocolStage.MASK: MaskedVector,
    ProtocolStage.AGREE: SignedSurvivors,
    ProtocolStage.REVEAL: RevealedShares,
}
_SECRETS = ("keys", "seeds")  # in the order of their shares' hashes
Shares = dict[int, dict[int, bytes]]


class SecureServer:
    """The server of one secure sum: reads clients' messages stage by stage, and returns their sum.

    Args:
        session: settings of the sum.
        directory: public signing keys of all clients by place; required in an active session.

    Attributes:
        stage: current stage; None when the session is over.
        awaited: places of the clients that may still answer at this stage.
        survivors: places of the clients whose vectors are in the sum.

    Raises:
        ValueError: if the directory is missing.
    """

    def __init__(self, session: Session, directory: Mapping[int, bytes] | None = None) -> None:
        self._session, self._signatures = session, Signatures(session, directory)
        self.stage: ProtocolStage | None = ProtocolStage.ADVERTISE
        self.awaited: Places = frozenset(range(session.num_clients))
        self.survivors: Places = frozenset()
        self._received: dict[int, Any] = {}
        self._total: RingIntegers | None = np.zeros(session.length, session.ring.dtype)
        self._roster: Table = {}
        self._sealed: dict[int, SealedShares] = {}
        self._graph: Graph = {}
        self._sharers: Places = frozenset()

    @property
    def total(self) -> RingIntegers:
        """Sum of the vectors of all surviving clients, of the ring's dtype, shape (size,).

        Raises:
            AbortedError: if the session has not come to its end.
        """
        if self.stage is not None or self._total is None:
            raise AbortedError("there is no sum: the session has not come to its end")
        return self._total[: self._session.size]

    def receive(self, data: bytes, sender: int | None = None) -> int:
        """Check and store a client's message, and return the client's place.

        Args:
            data: bytes of the message.
            sender: place of the client that has sent it, if known.

        Raises:
            MessageError: if these bytes are not a message that is due from the sender; nothing changes.
            ForgedError: if a signature is not the client's; nothing changes.
        """
        if self.stage is None:
            raise MessageError("no message is expected: the session is over")
        place, message = decode(self._session, data, _KINDS[self.stage])
        if sender is not None and place != sender:
            raise MessageError(f"client {sender} sent a message of client {place}")
        if place not in self.awaited:
            raise MessageError(f"client {place} sent a message that is not expected now")
        self._check(place, message)
        if isinstance(message, MaskedVector):
            self._total += message.values
            message = None
        self._received[place] = message
        self.awaited -= {place}
        return place

    def close_stage(self) -> dict[int, bytes]:
        """End the current stage, and return the server's next message to each remaining client, by place.

        After the last stage there are no messages, and `total` is available.

        Raises:
            AbortedError: if too few clients are left, or one has lied, which is named if it is known; no
                vector is revealed.
        """
        if self.stage is None:
            raise AbortedError("the session is over")
        close: dict[ProtocolStage, Callable[[Places], dict[int, AnyMessage]]] = {
            ProtocolStage.ADVERTISE: self._close_advertise,
            ProtocolStage.SHARE: self._close_share,
            ProtocolStage.MASK: self._close_mask,
            ProtocolStage.AGREE: self._close_agree,
            ProtocolStage.REVEAL: self._close_reveal,
        }
        try:
            messages = close[self.stage](frozenset(self._received))
        except AbortedError:
            self.stage, self._total = None, None
            raise
        later = [stage for stage in self._session.stages if stage > self.stage]
        self.stage = later[0] if later else None
        self.awaited, self._received = frozenset(messages), {}
        return {place: encode(self._session, place, message) for place, message in messages.items()}

    def _close_advertise(self, there: Places) -> dict[int, AnyMessage]:
        session = self._session
        self._check_enough(len(there), session.least_survivors)
        self._roster = {place: m.keys + m.signature for place, m in self._received.items()}
        self._graph = neighbours(there, session.num_neighbours, session.graph_seed)
        return {
            place: Roster(there, {peer: self._roster[peer] for peer in near | {place}})
            for place, near in self._graph.items()
        }

    def _close_share(self, there: Places) -> dict[int, AnyMessage]:
        self._check_enough(len(there), self._session.least_survivors)
        self._sharers = there
        self._sealed = dict(self._received)
        return {place: self._mailbox(place, self._graph[place] & there) for place in there}

    def _mailbox(self, place: int, near: Places) -> Mailbox:
        return Mailbox(
            self._sharers,
            {peer: self._sealed[peer].boxes[place] for peer in near},
            {peer: self._sealed[peer].hashes[place] for peer in near},
        )

    def _close_mask(self, there: Places) -> dict[int, AnyMessage]:
        self._check_enough(len(there), self._session.least_survivors)
        self.survivors = there
        if self._session.active:
            return dict.fromkeys(there, Survivors(there))
        return dict.fromkeys(there, RevealRequest(there, self._sharers - there, {}))

    def _close_agree(self, there: Places) -> dict[int, AnyMessage]:
        self._check_enough(len(there), self._session.threshold)
        # no more than needed, because clients check each one
        signers = sorted(there)[: self._session.threshold]
        signatures = {place: self._received[place].signature for place in signers}
        dropped = self._sharers - self.survivors
        return dict.fromkeys(there, RevealRequest(self.survivors, dropped, signatures))

    def _close_reveal(self, there: Places) -> dict[int, AnyMessage]:
        if self._session.num_neighbours is None:
            self._check_enough(len(there), self._session.threshold)
        assert self._total is not None
        self._remove_pads(self._total)
        return {}

    def _check_enough(self, count: int, least: int) -> None:
        if count < least:
            assert self.stage is not None
            raise AbortedError(
                f"{count} clients answered at stage {self.stage.name}, at least {least} must: "
                "have more clients in a cohort, a longer time to answer, or a lower threshold"
            )

    def _check(self, place: int, message: AnyMessage) -> None:
        """Raise ValueError if a client's message would make other clients fail."""
        near = self._graph.get(place, frozenset())
        if isinstance(message, SealedShares) and (
            message.boxes.keys() != near or message.hashes.keys() != near | {place}
        ):
            raise MessageError(f"client {place} has not sealed shares for exactly its neighbours")
        if isinstance(message, RevealedShares):
            near = near & self._sharers | {place}
            seeds, keys = near & self.survivors, near - self.survivors
            if message.seeds.keys() != seeds or message.keys.keys() != keys:
                raise MessageError(
                    f"client {place} has revealed other shares than the requested ones"
                )
        if isinstance(message, Advertisement):
            self._signatures.check("keys", place, message.keys, message.signature)
        if isinstance(message, SignedSurvivors):
            bits = places_as_bits(self._session, self.survivors)
            self._signatures.check("survivors", place, bits, message.signature)

    def _remove_pads(self, total: RingIntegers) -> None:
        """Subtract from the sum, in place, all pads that clients have added to their vectors.

        Raises:
            AbortedError: if a secret has too few shares, or somebody lied.
        """
        secrets = self._checked(self._collected())
        for place, seed in secrets["seeds"].items():
            own_pad = seed_pad_key(self._session, place, seed)
            add_pad(total, own_pad, self._session.ring, subtract=True)
        for place, private in secrets["keys"].items():
            key = AgreementKey(private)
            for peer in (
                self._graph[place] & self.survivors
            ):  # they have added a pad with this client
                public, about = self._pad_key(peer), self._session.identity
                secret = key.secret_with(public, "pads", about, me=place, peer=peer)
                add_pad(total, secret, self._session.ring, subtract=peer < place)
        self._session.ring.reduced(total)
        if not has_checksum(total, self._session.ring):
            raise AbortedError(
                "the sum does not fit its checksum: a client sent something else than its vector "
                "under its pads, or two clients used different pads"
            )

    def _collected(self) -> dict[str, Shares]:
        """Return the revealed shares of keys and of seeds, as dicts: owner of the secret to holder of the share to share."""
        collected: dict[str, Shares] = {kind: {} for kind in _SECRETS}
        lies = []
        for holder, answer in sorted(self._received.items()):
            for kind in _SECRETS:
                for place, share in sorted(getattr(answer, kind).items()):
                    if share_hash(self._session, kind, place, holder, share) != self._bound(
                        kind, place, holder
                    ):
                        lies.append(
                            f"client {holder} revealed a false share of client {place}'s {kind[:-1]}"
                        )
                    collected[kind].setdefault(place, {})[holder] = share
        if lies:
            raise AbortedError("; ".join(lies))
        return collected

    def _checked(self, shares: dict[str, Shares]) -> dict[str, dict[int, bytes]]:
        """Reconstruct the clients' secrets from shares, check them, and return them by kind and client."""
        for place in self.survivors - shares["seeds"].keys():
            raise AbortedError(
                f"no client has revealed a share of client {place}'s seed, so its pad cannot be removed"
            )
        secrets: dict[str, dict[int, bytes]] = {kind: {} for kind in _SECRETS}
        for kind in _SECRETS:
            for place, held in shares[kind].items():
                secrets[kind][place] = secret = self._combined(kind, place, held)
                is_key = kind == "keys"
                told = (
                    AgreementKey(secret).public
                    if is_key
                    else seed_commitment(self._session, place, secret)
                )
                bound = self._pad_key(place) if is_key else self._sealed[place].commitment
                if told != bound:
                    raise AbortedError(
                        f"client {place} has dealt false shares of its {kind[:-1]}: their secret does not "
                        "fit its commitment"
                    )
        return secrets

    def _combined(self, kind: str, place: int, held: Mapping[int, bytes]) -> bytes:
        numbers = {holder + 1: int.from_bytes(share, "little") for holder, share in held.items()}
        if len(numbers) < self._session.threshold:
            raise AbortedError(
                f"client {place}'s {kind[:-1]} stays unknown: {len(numbers)} shares of the "
                f"{self._session.threshold} needed"
            )
        try:
            return combine(numbers, self._session.threshold)
        except ValueError:
            # each share fits the hash of its dealer
            raise AbortedError(
                f"client {place} has dealt false shares of its {kind[:-1]}: they do not belong "
                "together"
            ) from None

    def _bound(self, kind: str, place: int, holder: int) -> bytes:
        start = _SECRETS.index(kind) * SHARE_HASH_SIZE
        return self._sealed[place].hashes[holder][start : start + SHARE_HASH_SIZE]

    def _pad_key(self, place: int) -> bytes:
        return self._roster[place][KEY_SIZE : 2 * KEY_SIZE]
