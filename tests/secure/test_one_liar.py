"""One liar at every place, or one damaged message, whoever drops: exact or aborted, never wrong.

A client that refuses, and one whose bytes the server refuses, is silent from then on, as in a network.
"""

import copy
import itertools
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from forged import parts, with_header
from test_secure_protocol import DIRECTORY, SIGNING, parties, plain_sum, session, vectors_of

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.entropy import seeded_entropy
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.keys import AgreementKey, seal
from fl_lightning.secure.protocol.messages import (
    Advertisement,
    MaskedVector,
    RevealedShares,
    Roster,
    SealedShares,
    SignedSurvivors,
    decode,
    encode,
)
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import AbortedError, ProtocolStage, new_run_id
from fl_lightning.secure.protocol.shamir import (
    SHARE_HASH_SIZE,
    seed_commitment,
    share_hashes,
)

UP = dict(
    zip(
        ProtocolStage,
        (Advertisement, SealedShares, MaskedVector, SignedSurvivors, RevealedShares),
        strict=True,
    )
)


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def entry(table, place, at=0):
    """Return the table with one bit of one entry changed."""
    return {**table, place: flipped(table[place], at)} if place in table else dict(table)


class Liar:
    """Lies in one way at one stage; until then, and after, it is as honest as it can be.

    Args:
        stage: at which its message is another.
        change: makes another message of the honest one: (session, client, message, victim).
        named: whether whoever finds it out can say who lied.
    """

    def __init__(self, stage, change, named=False):
        self.stage, self.change, self.named = stage, change, named

    def answer(self, made, client, place, stage, data, victim):
        if stage != self.stage:
            return data
        _, message = decode(made, data, UP[stage])
        return encode(made, place, self.change(made, client, message, victim))


def false_share(offset):
    """Return a dealer of one false share, which it is bound to: the polynomial is no polynomial."""

    def change(made, client, message, victim):
        if victim not in message.boxes:  # it has fallen silent before
            return message
        box_secret, me = client._box_secrets[victim], client._place
        false = flipped(client._opened_own[victim], offset)
        box = seal(box_secret, false, made.identity, sender=me, receiver=victim)
        hashes = {**message.hashes, victim: share_hashes(made, me, victim, false)}
        return replace(message, boxes={**message.boxes, victim: box}, hashes=hashes)

    return change


def other_keys(at):
    def change(made, client, message, victim):
        keys = bytearray(message.keys)
        keys[at : at + 32] = AgreementKey(b"another key" * 2 + bytes(10)).public
        return replace(message, keys=bytes(keys))

    return change


def told(kind, at=0, own=False):
    """Return a change of one bit of what is told of the victim, or of oneself."""
    return lambda made, client, m, victim: replace(
        m, **{kind: entry(getattr(m, kind), client._place if own else victim, at)}
    )


def one_number(made, client, message, victim):
    values = message.values.copy()
    values[victim % made.size] ^= 1 << made.bits - 1
    return MaskedVector(values)


def of_seed(commitment):
    return lambda made, client, m, victim: replace(m, commitment=commitment(made, client, m))


ADVERTISE, SHARE, MASK, AGREE, REVEAL = ProtocolStage
LIES = {
    "box key": Liar(ADVERTISE, other_keys(0)),
    "pad key": Liar(ADVERTISE, other_keys(32)),
    "box": Liar(SHARE, told("boxes"), named=True),
    "hash": Liar(SHARE, told("hashes"), named=True),
    # of the seed's share: nobody is asked for the share of its own key
    "own hash": Liar(SHARE, told("hashes", SHARE_HASH_SIZE, own=True), named=True),
    "commitment": Liar(SHARE, of_seed(lambda s, c, m: flipped(m.commitment)), named=True),
    "other seed": Liar(
        SHARE, of_seed(lambda s, c, m: seed_commitment(s, c._place, bytes(32))), named=True
    ),
    "false share of the key": Liar(SHARE, false_share(0), named=True),
    "false share of the seed": Liar(SHARE, false_share(33), named=True),
    "no pad": Liar(MASK, lambda s, c, m, v: replace(m, values=c._vector)),
    "one number": Liar(MASK, one_number),
    "seed told": Liar(REVEAL, told("seeds"), named=True),
    "key told": Liar(REVEAL, told("keys"), named=True),
    "survivors signed": Liar(AGREE, lambda s, c, m, v: SignedSurvivors(flipped(m.signature))),
}


class LyingClient(SecureClient):
    """Remembers the shares that it deals, to be able to deal false ones."""

    def _sealed(self, peer, share):
        self._opened_own = {**getattr(self, "_opened_own", {}), peer: share}
        return super()._sealed(peer, share)


class Play:
    """One session with one liar, under one or under every pattern of dropouts.

    Args:
        made: the session.
        liar: its place; None for nobody.
        lie: how it lies.
        victim: whom its lie is about.
    """

    def __init__(self, made, liar=None, lie=None, victim=0):
        self.made, self.liar, self.lie, self.victim = made, liar, lie, victim
        self.vectors = vectors_of(made)
        self.sums, self.reasons = 0, set()

    def begin(self):
        clients, server = parties(self.made, self.vectors)
        if self.liar is not None:
            place = self.liar
            clients[place] = LyingClient(
                self.made,
                place,
                self.vectors[place],
                entropy=seeded_entropy(0, "test", place),
                used={},
                signing_key=SIGNING[place],
                directory=DIRECTORY,
            )
        return clients, server, dict.fromkeys(clients, b"")

    def answers(self, clients, incoming, stage):
        """Return what is sent by those who answer."""
        sent = {}
        for place, data in incoming.items():
            try:
                answer = clients[place].receive(data) if data else clients[place].advertise()
            except ValueError as error:
                self.reasons.add(str(error))
                continue
            if place == self.liar:
                answer = self.lie.answer(
                    self.made, clients[place], place, stage, answer, self.victim
                )
            sent[place] = answer
        return sent

    def closed(self, server, sent):
        """Have the server take messages in; return its answers, None if it gave up."""
        for data in sent:
            try:
                server.receive(data)
            except ValueError as error:
                self.reasons.add(str(error))
        try:
            return server.close_stage()
        except AbortedError as error:
            self.reasons.add(str(error))
            with pytest.raises(AbortedError, match="there is no sum"):
                _ = server.total
            return None

    def finish(self, server):
        assert server.total.tolist() == plain_sum(self.made, self.vectors, server.survivors)
        self.sums += 1

    def once(self, dropouts):
        """Play with these dropouts, the first stage at which a client is silent, by place."""
        clients, server, incoming = self.begin()
        for stage in self.made.stages:
            there = {p: d for p, d in incoming.items() if dropouts.get(p, stage + 1) > stage}
            incoming = self.closed(server, self.answers(clients, there, stage).values())
            if incoming is None:
                return
        self.finish(server)

    def always(self):
        """Play with every pattern of dropouts, each message computed once."""
        self._walk(*self.begin(), list(self.made.stages))

    def _walk(self, clients, server, incoming, stages):
        sent = self.answers(clients, incoming, stages[0])
        moment = pickle.dumps(server)
        # with fewer the server gives up at once: the tree of all patterns says so
        for count in range(self.made.threshold, len(sent) + 1):
            for there in itertools.combinations(sent, count):
                branch = pickle.loads(moment)
                messages = self.closed(branch, [sent[place] for place in there])
                if messages is None:
                    continue
                if not stages[1:]:
                    self.finish(branch)
                    continue
                copies = {place: copy.copy(clients[place]) for place in messages}
                self._walk(copies, branch, messages, stages[1:])


CASES = [
    pytest.param(name, place, victim, id=f"{name}, {place} of {victim}")
    for name in LIES
    for place in range(6)
    for victim in ((place + 1) % 6, (place + 4) % 6)
]


def made_for(name):
    """Return a session in which this can be lied about."""
    return session(active=True, threshold=5) if name == "survivors signed" else session(bits=20)


@pytest.mark.parametrize("name", LIES)
def test_a_liar_makes_no_wrong_sum_with_no_share_to_spare(name):
    """Two others fall silent, one before its vector and one after, so that every share is needed."""
    lie, finished = LIES[name], 0
    made = made_for(name)
    for place, victim in ((0, 1), (3, 1), (5, 0)):
        late, early = [p for p in range(6) if p not in (place, victim)][:2]
        for dropouts in (
            {},
            {late: ProtocolStage.REVEAL, early: ProtocolStage.MASK},
            {victim: ProtocolStage.MASK},
        ):
            play = Play(made, place, lie, victim)
            play.once(dropouts)
            finished += play.sums
            found_out = [r for r in play.reasons if f"client {place} " in r]
            if lie.named and not play.sums:
                assert found_out, play.reasons
    if lie.stage in (ProtocolStage.ADVERTISE, ProtocolStage.AGREE):
        assert finished  # such a client is left out, and the sum is that of the others
    if lie.stage == ProtocolStage.MASK:
        assert not finished


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "victim"), CASES)
def test_a_liar_makes_no_wrong_sum_for_every_pattern_of_dropouts(name, place, victim):
    play = Play(made_for(name), place, LIES[name], victim)
    play.always()
    assert play.sums or play.reasons


@pytest.mark.slow
def test_without_a_liar_every_one_of_these_patterns_has_its_sum():
    play = Play(session(bits=20))
    play.always()
    assert (play.sums, play.reasons & {"there is no sum"}) == (265, set())


def test_the_liar_is_named():
    made = session()
    for name, words in (
        ("seed told", "client 2 revealed a false share of client 3's seed"),
        ("own hash", "client 2 revealed a false share of client 2's seed"),
        ("other seed", "client 2 has dealt false shares of its seed"),
        ("false share of the seed", "client 2 has dealt false shares of its seed"),
        ("hash", "client 2 sent client 3 other shares than those it is bound to"),
        ("box", "the box from client 2 to client 3 is forged"),
    ):
        play = Play(made, 2, LIES[name], 3)
        play.once({})
        assert any(words in reason for reason in play.reasons), (name, play.reasons)


class Channel(Play):
    """Nobody lies, but one message to or from one client is changed on its way.

    Args:
        made: the session.
        stage: of the message.
        place: of the client.
        change: of the bytes.
        down: whether it is the server's.
    """

    def __init__(self, made, stage, place, change, *, down):
        super().__init__(made)
        self.at, self.change, self.down = (stage, place), change, down

    def answers(self, clients, incoming, stage):
        changed = self.at[0] == stage and self.at[1] in incoming
        if changed and self.down:
            incoming = incoming | {self.at[1]: self.change(incoming[self.at[1]])}
        sent = super().answers(clients, incoming, stage)
        if changed and not self.down and self.at[1] in sent:
            sent[self.at[1]] = self.change(sent[self.at[1]])
        return sent


def test_a_pad_key_that_is_changed_on_its_way_to_one_client():
    """Both clients leave: they can open none of the other's boxes. The other four have their sum."""
    made = session(bits=20)
    for place, peer in ((0, 1), (1, 0), (2, 5), (5, 3)):

        def change(data, place=place, peer=peer):
            _, roster = decode(made, data, Roster)
            keys = {**roster.keys, peer: flipped(roster.keys[peer], 40)}
            return encode(made, place, replace(roster, keys=keys))

        play = Channel(made, ProtocolStage.SHARE, place, change, down=True)
        play.once({})
        assert play.sums == 1
        assert any(f"from client {peer} to client {place}" in reason for reason in play.reasons)


def played_with_damage(count, active):
    """Change one byte of one message, and its checksum to fit, so often; return how many ended."""
    chance, finished = random.Random(int(active)), 0
    made = session(active=active, threshold=5 if active else 4, bits=20)

    def change(data):
        header, body = parts(data)
        at = chance.randrange(len(body))
        changed = body[:at] + bytes([body[at] ^ chance.randrange(1, 256)]) + body[at + 1 :]
        return with_header(header, changed)

    for _ in range(count):
        down = chance.random() < 0.6
        stage = chance.choice(made.stages[1:] if down else made.stages)
        play = Channel(made, stage, chance.randrange(6), change, down=down)
        silent = chance.sample(range(6), chance.randrange(2))
        play.once({place: chance.choice(made.stages) for place in silent})
        finished += play.sums
    return finished


@pytest.mark.parametrize("active", [False, True])
def test_one_changed_byte_makes_no_wrong_sum(active):
    assert 5 < played_with_damage(25, active) < 25


@pytest.mark.slow
@pytest.mark.parametrize("active", [False, True])
def test_one_changed_byte_makes_no_wrong_sum_in_many_runs(active):
    assert played_with_damage(3000, active)


def test_what_was_recorded_in_another_run_is_not_accepted():
    """The same seed, the same round, the same settings: another run."""
    recorded = session(run=new_run_id(), active=True, threshold=5)
    now = session(run=new_run_id(), active=True, threshold=5)
    advertisement = parties(recorded, vectors_of(recorded))[0][0].advertise()
    server = SecureServer(now, DIRECTORY)
    with pytest.raises(MessageError, match="another run"):
        server.receive(advertisement)
    # and with the new run's identity written over the old one's its signature is wrong
    _, message = decode(recorded, advertisement, Advertisement)
    with pytest.raises(ValueError, match="signature of client 0's keys is wrong"):
        server.receive(encode(now, 0, message))


def test_the_checksum_finds_a_pad_that_stays_in_the_sum():
    made = session(bits=7, size=50)
    play = Play(made)
    clients, server, incoming = play.begin()
    for stage in made.stages:
        if stage == ProtocolStage.REVEAL:
            server._total += np.arange(len(server._total)).astype(server._total.dtype)
        incoming = play.closed(server, play.answers(clients, incoming, stage).values())
    assert incoming is None
    assert any("does not fit its checksum" in reason for reason in play.reasons)
