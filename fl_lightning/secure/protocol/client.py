"""A client of a secure sum, and its checks of the server's messages.

    y_u = x_u + pad(b_u) + Σ_{v>u} pad(s_uv) - Σ_{v<u} pad(s_uv)  mod R        v: u's neighbours

Over all survivors the pads s_uv cancel. The other clients send shares of the key behind s_uv of clients
that have dropped out, and shares of b_u of survivors, but never both of one client: both together
reveal its vector. Sources: Bonawitz et al. 2017, figure 4, with everything underlined there against an active
server; Bell et al. 2020, algorithm 2, for a sparse graph. Differs: boxes are opened when they
arrive, not when they are needed, and only by two clients that were told the same keys of each other;
shares must fit the hashes that their sender has committed to; a client knows all participants and
finds its neighbours itself. The meaning of thresholds: section 6 of Bonawitz et al. 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.entropy import Entropy, system_entropy
from fl_lightning.secure.protocol.keys import (
    KEY_SIZE,
    AgreementKey,
    ForgedError,
    Signatures,
    add_pad,
    seal,
    unseal,
)
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
    decode,
    encode,
    places_as_bits,
)
from fl_lightning.secure.protocol.session import RefusedError, Session, neighbours_of
from fl_lightning.secure.protocol.shamir import (
    SHARE_SIZE,
    seed_commitment,
    seed_pad_key,
    share_hashes,
    split,
)
from fl_lightning.secure.ring import RingIntegers, with_checksum


class SecureClient:
    """A client of one secure sum: answers the server's messages in order, each of them once.

    After a refusal, it answers no further message. Bytes that are no valid message change nothing.

    Args:
        session: settings of the sum.
        place: place of this client, from 0 to n - 1.
        vector: integers of the session's ring, shape (size,).
        entropy: source of its secrets; others than the default are for simulations.
        used: latest round in which this client has taken part, by run; kept over restarts, because pads
            that are used twice reveal two vectors. It is updated in place.
        signing_key: key that signs its messages; required in an active session.
        directory: public signing keys of all clients by place; required in an active session.

    Raises:
        ValueError: if the vector or the place does not fit the session, or keys are missing.
    """

    def __init__(
        self,
        session: Session,
        place: int,
        vector: RingIntegers,
        *,
        used: dict[str, int],
        entropy: Entropy = system_entropy,
        signing_key: Ed25519PrivateKey | None = None,
        directory: Mapping[int, bytes] | None = None,
    ) -> None:
        if not 0 <= place < session.num_clients:
            raise ValueError(f"place must be from 0 to {session.num_clients - 1}, got {place}")
        if vector.shape != (session.size,):
            raise ValueError(f"vector must have shape ({session.size},), got {vector.shape}")
        if session.active and (signing_key is None or directory is None):
            raise ValueError(
                "active: true needs signing_key and directory, by which clients recognise each other"
            )
        vector = with_checksum(session.ring.checked(vector), session.ring)
        self._session, self._place = session, place
        self._vector, self._entropy, self._used = vector, entropy, used
        self._signatures = Signatures(session, directory, signing_key)
        self._expects: type[Any] | None = None
        self._refused = ""

    def advertise(self) -> bytes:
        """Return the client's first message, which has its new public keys.

        Raises:
            RefusedError: if the client has taken part in this round or a later one.
        """
        run, number = self._session.run, self._session.round_index
        if number <= (latest := self._used.get(run, -1)):
            raise RefusedError(
                f"round {number} of run {run!r} is not new: this client has taken part in round {latest}"
            )
        self._used[run] = number
        self._box_key = AgreementKey(self._entropy(KEY_SIZE))
        self._pad_key = AgreementKey(self._entropy(KEY_SIZE))
        self._keys = self._box_key.public + self._pad_key.public
        self._expects = Roster
        signature = self._signatures.sign("keys", self._place, self._keys)
        return self._encoded(Advertisement(self._keys, signature))

    def receive(self, data: bytes) -> bytes:
        """Return the client's answer to a message of the server.

        Raises:
            MessageError: if these bytes are not the message that comes next.
            RefusedError: if an answer could reveal a secret.
            ForgedError: if a signature or a box is not from its client.
        """
        if self._refused:
            raise RefusedError(f"this client has left the session: {self._refused}")
        if self._expects is None:
            raise RefusedError("this client answers no message now: it has answered all of them")
        place, message = decode(self._session, data, self._expects)
        if place != self._place:
            raise MessageError(f"a message to client {place} came to client {self._place}")
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
        self._neighbours = self._checked_neighbours(roster)
        self._participants, self._roster = roster.participants, roster.keys
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

    def _checked_neighbours(self, roster: Roster) -> Places:
        """Return the clients that share secrets with this one; raise RefusedError if the server's roster is unsafe."""
        session, me = self._session, self._place
        if me not in roster.participants:
            raise RefusedError("the roster leaves this client out")
        self._check_enough(len(roster.participants), "participants")
        near = neighbours_of(me, roster.participants, session.num_neighbours, session.graph_seed)
        if len(near) + 1 < session.threshold:
            raise RefusedError(
                f"too few neighbours: {len(near)} besides this client, threshold is {session.threshold}"
            )
        if roster.keys.keys() != near | {me}:
            raise RefusedError("the roster must have the keys of this client and its neighbours")
        if roster.keys[me][: 2 * KEY_SIZE] != self._keys:
            raise RefusedError("the roster has another key for this client than its own")
        halves = [key[at : at + KEY_SIZE] for key in roster.keys.values() for at in (0, KEY_SIZE)]
        if len(set(halves)) < len(halves):
            raise RefusedError("two keys in the roster are the same")
        for place, entry in roster.keys.items():
            keys, signature = entry[: 2 * KEY_SIZE], entry[2 * KEY_SIZE :]
            self._signatures.check("keys", place, keys, signature)
        return near

    def _mask(self, mailbox: Mailbox) -> MaskedVector:
        session, ring = self._session, self._session.ring
        self._check_mailbox(mailbox)
        opened = {peer: self._opened(peer, box) for peer, box in mailbox.boxes.items()}
        for peer, shares in opened.items():
            if share_hashes(session, peer, self._place, shares) != mailbox.hashes[peer]:
                raise ForgedError(
                    f"client {peer} sent client {self._place} other shares than those it is bound to"
                )
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

    def _check_mailbox(self, mailbox: Mailbox) -> None:
        """Raise RefusedError if shares came from so few or such clients that pads would not protect the vector."""
        sharers, boxes = mailbox.sharers, mailbox.boxes
        if self._place not in sharers or not sharers <= self._participants:
            raise RefusedError(
                "the clients that shared must be participants, this client among them"
            )
        self._check_enough(len(sharers), "clients that shared")
        if not boxes.keys() == mailbox.hashes.keys() == self._neighbours & sharers:
            raise RefusedError("the boxes must be those of exactly the neighbours that shared")
        if len(boxes) + 1 < self._session.threshold:
            raise RefusedError(
                f"too few neighbours: {len(boxes)} shared besides this client; threshold is "
                f"{self._session.threshold}"
            )

    def _agree(self, message: Survivors) -> SignedSurvivors:
        self._check_survivors(message.survivors)
        self._agreed = message.survivors
        bits = places_as_bits(self._session, message.survivors)
        self._expects = RevealRequest
        return SignedSurvivors(self._signatures.sign("survivors", self._place, bits))

    def _reveal(self, request: RevealRequest) -> RevealedShares:
        self._check_survivors(request.survivors)
        if both := request.survivors & request.dropped:
            raise RefusedError(f"both secrets of clients {sorted(both)} are asked for")
        if request.survivors | request.dropped != self._sharers:
            raise RefusedError(
                "survivors and dropped clients together must be exactly the clients that sent shares"
            )
        if self._session.active:
            self._check_agreed(request)
        self._expects = None
        # the share of the key comes first, then that of the seed
        return RevealedShares(
            seeds={p: s[SHARE_SIZE:] for p, s in self._shares.items() if p in request.survivors},
            keys={p: s[:SHARE_SIZE] for p, s in self._shares.items() if p in request.dropped},
        )

    def _check_survivors(self, survivors: Places) -> None:
        """Raise RefusedError if the survivors that the server names cannot be right, e.g. without this client."""
        if not survivors <= self._sharers:
            extra = sorted(survivors - self._sharers)
            raise RefusedError(f"the survivors must be among those who shared, {extra} are not")
        if self._place not in survivors:
            raise RefusedError("the survivors leave this client out, whose vector was sent")
        self._check_enough(len(survivors), "survivors")
        near, threshold = survivors & (self._neighbours | {self._place}), self._session.threshold
        if len(near) < threshold:
            raise RefusedError(
                f"{len(near)} survivors near this client are below the threshold, {threshold}"
            )

    def _check_agreed(self, request: RevealRequest) -> None:
        """Raise RefusedError or ForgedError unless enough clients have signed the same list of survivors."""
        session, signatures = self._session, request.signatures
        if request.survivors != self._agreed:
            raise RefusedError("the survivors have changed since this client signed them")
        if not signatures.keys() <= request.survivors:
            raise RefusedError("only survivors sign the survivors")
        if len(signatures) < session.threshold:
            raise RefusedError(
                f"{len(signatures)} signatures of the survivors are below the threshold, "
                f"{session.threshold}"
            )
        bits = places_as_bits(session, request.survivors)
        for place, signature in signatures.items():
            self._signatures.check("survivors", place, bits, signature)

    def _check_enough(self, count: int, what: str) -> None:
        if count < self._session.least_survivors:
            raise RefusedError(
                f"{count} {what} are too few: this session has at least "
                f"{self._session.least_survivors}"
            )

    def _secret(self, key: AgreementKey, public: bytes, purpose: str, peer: int) -> bytes:
        # bound to the keys of both, as this client has got them: if the peer has got other keys, neither can
        # open the other's box, and no pad is added that the peer does not know
        told = b"".join(self._roster[p][: 2 * KEY_SIZE] for p in sorted((self._place, peer)))
        context = self._session.identity + (told if purpose == "shares" else b"")
        return key.secret_with(public, purpose, context, me=self._place, peer=peer)

    def _sealed(self, peer: int, share: bytes) -> bytes:
        secret, identity = self._box_secrets[peer], self._session.identity
        return seal(secret, share, identity, sender=self._place, receiver=peer)

    def _opened(self, peer: int, box: bytes) -> bytes:
        secret, identity = self._box_secrets[peer], self._session.identity
        return unseal(secret, box, identity, sender=peer, receiver=self._place)

    def _encoded(self, message: Upward) -> bytes:
        return encode(self._session, self._place, message)


def _share_bytes(share: int) -> bytes:
    return share.to_bytes(SHARE_SIZE, "little")
