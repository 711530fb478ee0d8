"""One client of a secure sum, which shows its vector to nobody.

    y_u = x_u + pad(b_u) + Σ_{v>u} pad(s_uv) - Σ_{v<u} pad(s_uv)  mod R        v: u's neighbours

Over all survivors the pads s_uv cancel. Of clients that fell silent the others give shares of the
key behind s_uv, of survivors shares of b_u, never both of one client: with both its vector lies
open. Sources: Bonawitz et al. 2017, figure 4, with everything underlined there against an active
server; Bell et al. 2020, algorithm 2, for a sparse graph. Differs: boxes are opened when they
arrive, not when they are needed, and only by two clients that were told the same keys of each other;
shares must be those that their sender is bound to; a client knows all participants and finds its
neighbours itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_lightning.secure.entropy import Entropy, system_entropy
from fl_lightning.secure.protocol.checksum import with_checksum
from fl_lightning.secure.protocol.client_checks import (
    check_mailbox,
    check_request,
    check_roster,
    check_shares,
    check_survivors,
)
from fl_lightning.secure.protocol.commitments import seed_commitment, seed_pad_key, share_hashes
from fl_lightning.secure.protocol.graph import neighbours_of
from fl_lightning.secure.protocol.keys import KEY_SIZE, AgreementKey, SigningKey, seal, unseal
from fl_lightning.secure.protocol.messages import (
    Advertisement,
    Mailbox,
    MaskedVector,
    Places,
    RevealedShares,
    RevealRequest,
    Roster,
    SealedShares,
    SignedSurvivors,
    Survivors,
    Upward,
)
from fl_lightning.secure.protocol.pads import add_pad
from fl_lightning.secure.protocol.session import RefusedError, Session
from fl_lightning.secure.protocol.shamir import SHARE_SIZE, split
from fl_lightning.secure.protocol.signing import Directory, signed_content
from fl_lightning.secure.protocol.used_rounds import UsedRounds
from fl_lightning.secure.protocol.wire import decode, encode, places_as_bits
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.updates.wire.coding import DecodeError


class SecureClient:
    """Answers the server's messages of one session, each once and in order.

    After a refusal it answers nothing more. Bytes that are no valid message change nothing.

    Args:
        session: what all have agreed on.
        place: of this client, from 0 to n - 1.
        vector: integers of the session's ring, shape (size,).
        entropy: where its secrets come from; anything but the default is for simulations.
        used: the rounds that this client has taken part in: its state, kept over restarts, or
            ``UsedRounds()`` of a client that has taken part in none.
        signing_key: needed against an active server, as is
        directory: everyone's public signing keys.

    Raises:
        ValueError: if the vector or the place does not fit the session, or keys are missing.
        RefusedError: if ``used`` is missing: with pads given twice, two vectors lie open.
    """

    def __init__(
        self,
        session: Session,
        place: int,
        vector: RingIntegers,
        *,
        entropy: Entropy = system_entropy,
        used: UsedRounds | None = None,
        signing_key: SigningKey | None = None,
        directory: Directory | None = None,
    ) -> None:
        if not 0 <= place < session.num_clients:
            raise ValueError(f"place must be from 0 to {session.num_clients - 1}, got {place}")
        if vector.shape != (session.size,):
            raise ValueError(f"vector must have shape ({session.size},), got {vector.shape}")
        if session.active and (signing_key is None or directory is None):
            raise ValueError("active needs signing_key and directory: without, nobody is known")
        vector = with_checksum(session.ring.checked(vector), session.ring)
        if used is None:
            raise RefusedError(
                "used must be given, the rounds that this client has taken part in: after a restart "
                "its state as it was kept, UsedRounds() only for a client that never took part"
            )
        self._session, self._place = session, place
        self._vector, self._entropy, self._used = vector, entropy, used
        self._signing_key, self._directory = signing_key, directory
        self._expects: type[Any] | None = None
        self._refused = ""

    def advertise(self) -> bytes:
        """Return the first message.

        Raises:
            RefusedError: if this round has been used.
        """
        self._used.use(self._session.run, self._session.round_index)
        self._box_key = AgreementKey(self._entropy(KEY_SIZE))
        self._pad_key = AgreementKey(self._entropy(KEY_SIZE))
        self._keys = self._box_key.public + self._pad_key.public
        self._expects = Roster
        return self._encoded(Advertisement(self._keys, self._signed("keys", self._keys)))

    def receive(self, data: bytes) -> bytes:
        """Return the answer to a message of the server.

        Raises:
            DecodeError: if these bytes are not the message that comes next.
            RefusedError: if an answer could give a secret away.
            ForgedError: if somebody's signature or box is not theirs.
        """
        if self._refused:
            raise RefusedError(f"this client has left the session: {self._refused}")
        if self._expects is None:
            raise RefusedError("this client answers no message now: it has answered all of them")
        place, message = decode(self._session, data, self._expects)
        if place != self._place:
            raise DecodeError(f"a message to client {place} came to client {self._place}")
        answers: dict[type[Any], Callable[[Any], Upward]] = {
            Roster: self._share,
            Mailbox: self._mask,
            Survivors: self._agree,
            RevealRequest: self._reveal,
        }
        try:
            return self._encoded(answers[self._expects](message))
        except ValueError as error:
            self._refused = str(error)
            raise

    def _share(self, roster: Roster) -> SealedShares:
        session = self._session
        check_roster(session, self._place, self._keys, roster, self._directory)
        self._participants, self._roster = roster.participants, roster.keys
        self._neighbours = neighbours_of(
            self._place, roster.participants, session.num_neighbours, session.graph_seed
        )
        self._seed = self._entropy(KEY_SIZE)
        xs = [place + 1 for place in (*self._neighbours, self._place)]
        keys, seeds = (
            split(secret, xs, session.threshold, self._entropy)
            for secret in (self._pad_key.private, self._seed)
        )
        shares = {x - 1: _share_bytes(keys[x]) + _share_bytes(seeds[x]) for x in xs}
        hashes = {p: share_hashes(session, self._place, p, share) for p, share in shares.items()}
        self._shares: dict[int, bytes] = {self._place: shares.pop(self._place)}
        self._box_secrets = {
            peer: self._secret(self._box_key, roster.keys[peer][:KEY_SIZE], "shares", peer)
            for peer in self._neighbours
        }
        self._expects = Mailbox
        boxes = {peer: self._sealed(peer, share) for peer, share in shares.items()}
        return SealedShares(seed_commitment(session, self._place, self._seed), boxes, hashes)

    def _mask(self, mailbox: Mailbox) -> MaskedVector:
        session, ring = self._session, self._session.ring
        check_mailbox(session, self._place, self._participants, self._neighbours, mailbox)
        opened = {peer: self._opened(peer, box) for peer, box in mailbox.boxes.items()}
        check_shares(session, self._place, opened, mailbox)
        self._shares = self._shares | opened
        self._sharers = mailbox.sharers
        total = self._vector.copy()
        add_pad(total, seed_pad_key(session, self._place, self._seed), ring)
        for peer in sorted(mailbox.boxes):
            public = self._roster[peer][KEY_SIZE : 2 * KEY_SIZE]
            secret = self._secret(self._pad_key, public, "pads", peer)
            add_pad(total, secret, ring, subtract=peer < self._place)
        self._expects = Survivors if session.active else RevealRequest
        return MaskedVector(ring.reduced(total))

    def _agree(self, message: Survivors) -> SignedSurvivors:
        self._check_survivors(message.survivors)
        self._agreed = message.survivors
        bits = places_as_bits(self._session, message.survivors)
        self._expects = RevealRequest
        return SignedSurvivors(self._signed("survivors", bits))

    def _reveal(self, request: RevealRequest) -> RevealedShares:
        self._check_survivors(request.survivors)
        agreed = self._agreed if self._session.active else None
        check_request(self._session, self._sharers, agreed, request, self._directory)
        self._expects = None
        # a share of the key stands first, of the seed behind it
        return RevealedShares(
            seeds={p: s[SHARE_SIZE:] for p, s in self._shares.items() if p in request.survivors},
            keys={p: s[:SHARE_SIZE] for p, s in self._shares.items() if p in request.dropped},
        )

    def _check_survivors(self, survivors: Places) -> None:
        holders = self._neighbours | {self._place}
        check_survivors(self._session, self._place, self._sharers, holders, survivors)

    def _secret(self, key: AgreementKey, public: bytes, purpose: str, peer: int) -> bytes:
        # with the keys of both, as this client was told them: if the other was told others, boxes
        # between the two stay closed, and no pad is added of which the other knows nothing
        told = b"".join(self._roster[p][: 2 * KEY_SIZE] for p in sorted((self._place, peer)))
        context = self._session.identity + (told if purpose == "shares" else b"")
        return key.secret_with(public, purpose, context, me=self._place, peer=peer)

    def _sealed(self, peer: int, share: bytes) -> bytes:
        secret, identity = self._box_secrets[peer], self._session.identity
        return seal(secret, share, identity, sender=self._place, receiver=peer)

    def _opened(self, peer: int, box: bytes) -> bytes:
        secret, identity = self._box_secrets[peer], self._session.identity
        return unseal(secret, box, identity, sender=peer, receiver=self._place)

    def _signed(self, what: str, content: bytes) -> bytes:
        if not self._session.active or self._signing_key is None:
            return b""
        return self._signing_key.sign(signed_content(self._session, what, self._place, content))

    def _encoded(self, message: Upward) -> bytes:
        return encode(self._session, self._place, message)


def _share_bytes(share: int) -> bytes:
    return share.to_bytes(SHARE_SIZE, "little")
