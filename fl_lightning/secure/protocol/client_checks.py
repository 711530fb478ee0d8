"""When a client goes on: every check of what a server says, against what the client knows.

Sources: Bonawitz et al. 2017, figure 4; the thresholds' meaning in its section 6.
"""

from __future__ import annotations

from fl_lightning.secure.protocol.commitments import share_hashes
from fl_lightning.secure.protocol.graph import neighbours_of
from fl_lightning.secure.protocol.keys import KEY_SIZE, ForgedError
from fl_lightning.secure.protocol.messages import Mailbox, Places, RevealRequest, Roster, Table
from fl_lightning.secure.protocol.session import RefusedError, Session
from fl_lightning.secure.protocol.signing import Directory
from fl_lightning.secure.protocol.wire import places_as_bits


def check_roster(
    session: Session, me: int, own_keys: bytes, roster: Roster, directory: Directory | None
) -> None:
    """Raise RefusedError, or ForgedError, if the roster is not one to share secrets with."""
    if me not in roster.participants:
        raise RefusedError("the roster leaves this client out")
    _check_enough(session, len(roster.participants), "participants")
    near = neighbours_of(me, roster.participants, session.num_neighbours, session.graph_seed)
    holders = near | {me}
    if len(holders) < session.threshold:
        raise RefusedError(
            f"too few neighbours: {len(near)} and oneself, threshold is {session.threshold}"
        )
    if roster.keys.keys() != holders:
        raise RefusedError("the roster must have the keys of oneself and one's neighbours")
    if roster.keys[me][: 2 * KEY_SIZE] != own_keys:
        raise RefusedError("the roster has another key for this client than its own")
    halves = [entry[at : at + KEY_SIZE] for entry in roster.keys.values() for at in (0, KEY_SIZE)]
    if len(set(halves)) < len(halves):
        raise RefusedError("two keys in the roster are the same")
    if session.active and directory is not None:
        for place, entry in roster.keys.items():
            keys, signature = entry[: 2 * KEY_SIZE], entry[2 * KEY_SIZE :]
            directory.check(session, "keys", place, keys, signature)


def check_mailbox(
    session: Session, me: int, participants: Places, near: Places, mailbox: Mailbox
) -> None:
    """Raise RefusedError if a vector under these clients' pads would not be safe."""
    if me not in mailbox.sharers or not mailbox.sharers <= participants:
        raise RefusedError("those who shared must be participants, with oneself among them")
    _check_enough(session, len(mailbox.sharers), "clients that shared")
    if not mailbox.boxes.keys() == mailbox.hashes.keys() == near & mailbox.sharers:
        raise RefusedError("the boxes must be those of exactly the neighbours that shared")
    if len(mailbox.boxes) + 1 < session.threshold:
        raise RefusedError(
            f"too few neighbours: {len(mailbox.boxes)} shared, and oneself; threshold is "
            f"{session.threshold}"
        )


def check_shares(session: Session, me: int, opened: Table, mailbox: Mailbox) -> None:
    """Raise ForgedError if a neighbour has sent other shares than it is bound to."""
    for peer, shares in opened.items():
        if share_hashes(session, peer, me, shares) != mailbox.hashes[peer]:
            raise ForgedError(
                f"client {peer} sent client {me} other shares than those it is bound to"
            )


def check_survivors(
    session: Session, me: int, sharers: Places, holders: Places, survivors: Places
) -> None:
    """Raise RefusedError if these cannot be the clients whose vectors have arrived."""
    if not survivors <= sharers:
        extra = sorted(survivors - sharers)
        raise RefusedError(f"the survivors must be among those who shared, {extra} are not")
    if me not in survivors:
        raise RefusedError("the survivors leave this client out, whose vector was sent")
    _check_enough(session, len(survivors), "survivors")
    if len(survivors & holders) < session.threshold:
        raise RefusedError(
            f"{len(survivors & holders)} survivors near this client are below the threshold, "
            f"{session.threshold}"
        )


def check_request(
    session: Session,
    sharers: Places,
    agreed: Places | None,
    request: RevealRequest,
    directory: Directory | None,
) -> None:
    """Raise RefusedError, or ForgedError, if the shares asked for may not be told together."""
    both = request.survivors & request.dropped
    if both:
        raise RefusedError(f"both secrets of clients {sorted(both)} are asked for")
    if request.survivors | request.dropped != sharers:
        raise RefusedError("survivors and dropped together must be those who shared")
    if not session.active or directory is None:
        return
    if request.survivors != agreed:
        raise RefusedError("the survivors have changed since this client signed them")
    if not request.signatures.keys() <= request.survivors:
        raise RefusedError("only survivors sign the survivors")
    if len(request.signatures) < session.threshold:
        raise RefusedError(
            f"{len(request.signatures)} signatures of the survivors are below the threshold, "
            f"{session.threshold}"
        )
    bits = places_as_bits(session, request.survivors)
    for place, signature in request.signatures.items():
        directory.check(session, "survivors", place, bits, signature)


def _check_enough(session: Session, count: int, what: str) -> None:
    if count < session.least_survivors:
        raise RefusedError(
            f"{count} {what} are too few: this session has at least {session.least_survivors}"
        )
