"""The secure sum is the plain sum, bit for bit, whoever drops when; and what parties refuse."""

import copy
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.entropy import seeded_entropy
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.keys import ForgedError
from fl_lightning.secure.protocol.messages import (
    Advertisement,
    Mailbox,
    MaskedVector,
    RevealedShares,
    RevealRequest,
    Roster,
    SealedShares,
    SignedSurvivors,
    Survivors,
    decode,
    encode,
)
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import (
    AbortedError,
    ProtocolStage,
    RefusedError,
    Session,
)
from fl_lightning.secure.simulation import shortcut, simulate

SIGNING = {p: Ed25519PrivateKey.from_private_bytes(bytes([p]) * 32) for p in range(6)}
DIRECTORY = {place: key.public_key().public_bytes_raw() for place, key in SIGNING.items()}


def session(**options):
    settings = {"num_clients": 6, "size": 3, "threshold": 4, "round_index": 0}
    return Session(**({"run": "test"} | settings | options))


def vectors_of(session, seed=0):
    high = session.ring.modulus - 1
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, high, (session.num_clients, session.size), np.uint64, endpoint=True)
    return dict(enumerate(rows.astype(session.ring.dtype)))


def plain_sum(session, vectors, places):
    columns = zip(*(vectors[place].tolist() for place in places), strict=True)
    return [sum(column) % session.ring.modulus for column in columns]


def parties(session, vectors):
    clients = {
        place: SecureClient(
            session,
            place,
            vector,
            entropy=seeded_entropy(0, "test", place),
            used={},
            signing_key=SIGNING.get(place),
            directory=DIRECTORY,
        )
        for place, vector in vectors.items()
    }
    return clients, SecureServer(session, DIRECTORY)


class Tree:
    """Every way in which clients can drop, each message computed once."""

    def __init__(self, session):
        self.session, self.vectors = session, vectors_of(session)
        self.patterns = self.sums = 0

    def walk(self, clients, server, incoming, depth=0):
        """Go on from a moment when ``incoming`` has been sent to those who are still there."""
        answers = {
            place: clients[place].receive(data) if data else clients[place].advertise()
            for place, data in incoming.items()
        }
        left = len(self.session.stages) - 1 - depth
        moment = pickle.dumps(server)  # a tenth of the time of copy.deepcopy
        for count in range(len(answers) + 1):
            for there in itertools.combinations(answers, count):
                branch = pickle.loads(moment)
                for place in there:
                    branch.receive(answers[place])
                try:
                    messages = branch.close_stage()
                except AbortedError:
                    assert count < self.session.threshold
                    with pytest.raises(AbortedError, match="there is no sum"):
                        _ = branch.total
                    self.patterns += (left + 1) ** count  # whatever they would have done later
                    continue
                assert count >= self.session.threshold
                if left:
                    copies = {place: copy.copy(clients[place]) for place in there}
                    self.walk(copies, branch, messages, depth + 1)
                    continue
                expected = plain_sum(self.session, self.vectors, branch.survivors)
                assert branch.total.tolist() == expected
                self.patterns += 1
                self.sums += 1


@pytest.mark.parametrize(
    ("options", "stages", "sums"),
    [({"bits": 20, "threshold": 3}, 4, 181), ({"active": True, "threshold": 4, "size": 1}, 5, 26)],
)
def test_the_sum_is_exact_for_every_pattern_of_dropouts(options, stages, sums):
    tree = Tree(session(num_clients=5, **options))
    clients, server = parties(tree.session, tree.vectors)
    tree.walk(clients, server, dict.fromkeys(clients, b""))
    assert tree.patterns == (stages + 1) ** 5
    assert tree.sums == sums  # those with at most two dropouts, or one


def random_case(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(7, 14))
    kind = ("complete", "active", "sparse")[seed % 3]
    least = n // 2 + 1 if kind == "complete" else 2 * n // 3 + 1
    options = {"threshold": int(rng.integers(least, n + 1)), "active": kind == "active"}
    if kind == "sparse":
        k = 2 * int(rng.integers(1, (n - 3) // 2 + 1))
        options = {"num_neighbours": k, "threshold": int(rng.integers(2, k // 2 + 3))}
    made = session(
        num_clients=n,
        size=int(rng.integers(0, 40)),
        bits=int(rng.integers(1, 65)),
        round_index=seed,
        graph_seed=seed,
        **options,
    )
    silent = rng.permutation(n)[: rng.integers(0, n // 3 + 1)]
    stages = rng.choice([int(stage) for stage in made.stages], len(silent))
    return made, {int(p): ProtocolStage(s) for p, s in zip(silent, stages, strict=True)}


def outcome_of(run, *arguments):
    try:
        return run(*arguments)
    except AbortedError:
        return None


def test_larger_cases_and_the_shortcut_to_the_same_outcome():
    finished = dict.fromkeys(("complete", "active", "sparse"), 0)
    aborted = counted = 0
    for seed in range(48):
        made, dropouts = random_case(seed)
        if seed % 4:  # for which there is a shortcut
            dropouts = dict.fromkeys(dropouts, ProtocolStage.MASK)
        vectors = vectors_of(made, seed)
        outcome = outcome_of(simulate, made, vectors, dropouts)
        aborted += outcome is None
        if outcome is not None:
            silent = {place for place, stage in dropouts.items() if stage <= ProtocolStage.MASK}
            assert not silent & outcome.survivors
            assert outcome.total.tolist() == plain_sum(made, vectors, outcome.survivors)
            finished[("complete", "active", "sparse")[seed % 3]] += 1
        if seed % 4:
            short = outcome_of(shortcut, made, vectors, dropouts)
            assert (outcome is None) == (short is None)
        if seed % 4 and outcome is not None:
            assert np.array_equal(short.total, outcome.total)
            assert short.survivors == outcome.survivors
            assert short.cost.bytes_up == outcome.cost.bytes_up
            assert short.cost.bytes_down == outcome.cost.bytes_down
            counted += 1
    assert min(*finished.values(), aborted, counted) >= 5


def conversation(made, until, dropouts=()):
    """Return the clients, the server and what it has sent last, before clients answer that."""
    vectors = vectors_of(made)
    clients, server = parties(made, vectors)
    incoming = dict.fromkeys(clients, b"")
    for stage in made.stages:
        if stage == until:
            break
        for place, data in incoming.items():
            if (place, stage) not in dropouts:
                server.receive(clients[place].receive(data) if data else clients[place].advertise())
        incoming = server.close_stage()
    return clients, server, incoming


KINDS = {
    ProtocolStage.SHARE: Roster,
    ProtocolStage.MASK: Mailbox,
    ProtocolStage.AGREE: Survivors,
    ProtocolStage.REVEAL: RevealRequest,
}


def lie(made, data, kind, change):
    place, message = decode(made, data, kind)
    return encode(made, place, change(message))


def without(table, *places):
    return {place: entry for place, entry in table.items() if place not in places}


# by stage and whether the server may be active: what a client says, and of which lie
OF_THE_SERVER = {
    (ProtocolStage.SHARE, False): {
        "3 participants are too few": lambda m: Roster(
            frozenset({0, 1, 2}), without(m.keys, 3, 4, 5)
        ),
        "leaves this client out": lambda m: Roster(m.participants - {0}, without(m.keys, 0)),
        "keys of this client and its neighbours": lambda m: replace(m, keys=without(m.keys, 5)),
        "another key for this client": lambda m: replace(m, keys={**m.keys, 0: bytes(64)}),
        "two keys in the roster are the same": lambda m: replace(m, keys={**m.keys, 1: m.keys[2]}),
    },
    (ProtocolStage.SHARE, True): {
        "signature of client 1's keys is wrong": lambda m: replace(
            m, keys={**m.keys, 1: bytes(range(64)) + m.keys[1][64:]}
        ),
    },
    (ProtocolStage.MASK, False): {
        "3 clients that shared are too few": lambda m: replace(m, sharers=frozenset({0, 1, 2})),
        "boxes must be those of exactly the neighbours that shared": lambda m: replace(
            m, boxes=without(m.boxes, 5)
        ),
        "the box from client 1 to client 0 is forged": lambda m: replace(
            m, boxes={**m.boxes, 1: m.boxes[2]}
        ),
        "this client among them": lambda m: replace(m, sharers=m.sharers - {0}),
    },
    (ProtocolStage.REVEAL, False): {
        r"both secrets of clients \[2\]": lambda m: replace(m, dropped=frozenset({2})),
        "together must be exactly the clients that sent shares": lambda m: replace(
            m, survivors=m.survivors - {2}
        ),
        "3 survivors are too few": lambda m: RevealRequest(
            frozenset({0, 1, 2}), frozenset({3, 4, 5}), {}
        ),
        "survivors leave this client out": lambda m: RevealRequest(
            m.survivors - {0}, frozenset({0}), {}
        ),
    },
    (ProtocolStage.AGREE, True): {
        "4 survivors are too few": lambda m: Survivors(frozenset({0, 1, 2, 3})),
    },
    (ProtocolStage.REVEAL, True): {
        "survivors have changed since this client signed": lambda m: RevealRequest(
            m.survivors - {5}, frozenset({5}), without(m.signatures, 5)
        ),
        "4 signatures of the survivors are below the threshold, 5": lambda m: replace(
            m, signatures=without(m.signatures, 4, 5)
        ),
        "signature of client 1's survivors is wrong": lambda m: replace(
            m, signatures={**m.signatures, 1: m.signatures[2]}
        ),
    },
}


@pytest.mark.parametrize(("stage", "active"), OF_THE_SERVER)
def test_a_client_refuses_a_server_that_lies(stage, active):
    made = session(active=active, threshold=5 if active else 4)
    for refusal, change in OF_THE_SERVER[stage, active].items():
        clients, _, incoming = conversation(made, stage)
        told = lie(made, incoming[0], KINDS[stage], change)
        with pytest.raises((RefusedError, ForgedError), match=refusal):
            clients[0].receive(told)
        with pytest.raises(RefusedError, match="has left the session"):
            clients[0].receive(incoming[0])


def test_a_client_refuses_survivors_that_never_shared():
    made = session()
    clients, _, incoming = conversation(made, ProtocolStage.REVEAL, {(5, ProtocolStage.SHARE)})
    told = lie(made, incoming[0], RevealRequest, lambda m: replace(m, survivors=m.survivors | {5}))
    with pytest.raises(RefusedError, match=r"among those who shared, \[5\] are not"):
        clients[0].receive(told)


def test_a_client_answers_once():
    """A second request with other survivors would get the other secret."""
    made = session()
    clients, _, incoming = conversation(made, ProtocolStage.REVEAL)
    clients[0].receive(incoming[0])
    changed = lie(
        made,
        incoming[0],
        RevealRequest,
        lambda m: RevealRequest(m.survivors - {5}, frozenset({5}), {}),
    )
    for told in (incoming[0], changed):
        with pytest.raises(RefusedError, match="answered all of them"):
            clients[0].receive(told)


def test_a_client_with_too_few_neighbours_refuses():
    made = session(num_clients=12, num_neighbours=4, threshold=4)
    clients, _, incoming = conversation(made, ProtocolStage.MASK)
    near = sorted(decode(made, incoming[0], Mailbox)[1].boxes)
    told = lie(
        made,
        incoming[0],
        Mailbox,
        lambda m: Mailbox(
            m.sharers - set(near[:2]), without(m.boxes, *near[:2]), without(m.hashes, *near[:2])
        ),
    )
    with pytest.raises(RefusedError, match="too few neighbours: 2 shared besides this client"):
        clients[0].receive(told)


def test_a_client_gives_no_round_twice_and_remembers_after_a_restart():
    used, vector = {}, np.zeros(3, np.uint32)
    SecureClient(session(round_index=4), 0, vector, used=used).advertise()
    for round_index in (3, 4):
        client = SecureClient(session(round_index=round_index), 0, vector, used=used)
        with pytest.raises(RefusedError, match="has taken part in round 4"):
            client.advertise()
    SecureClient(session(round_index=5), 0, vector, used=used).advertise()
    assert list(used.values()) == [5]
    client = SecureClient(session(), 0, vector, used={})
    client.advertise()
    with pytest.raises(RefusedError, match="is not new"):
        client.advertise()


def test_masked_vectors_tell_nothing_before_the_end():
    sent = []
    for round_index in (0, 1):  # of the same vectors
        made = session(round_index=round_index, size=100_000, bits=8)
        clients, _, incoming = conversation(made, ProtocolStage.MASK)
        answers = [clients[p].receive(incoming[p]) for p in (0, 1)]
        sent.append([decode(made, data, MaskedVector)[1].values for data in answers])
    changed = np.unpackbits(sent[0][0] ^ sent[1][0]).mean()
    assert abs(changed - 0.5) < 4 * 0.5 / (8 * 100_000) ** 0.5
    for seen in (sent[0][0], sent[0][0] + sent[0][1]):
        counts = np.bincount(seen, minlength=256)
        expected = len(seen) / 256
        # 255 degrees of freedom: mean 255, standard deviation 22.6
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4 * 22.6


def test_the_server_refuses_what_others_would_stumble_over():
    made = session(active=True, threshold=5)
    clients, server, incoming = conversation(made, ProtocolStage.SHARE)
    answer = clients[0].receive(incoming[0])
    missing = lie(made, answer, SealedShares, lambda m: replace(m, boxes=without(m.boxes, 3)))
    with pytest.raises(MessageError, match="exactly its neighbours"):
        server.receive(missing)
    assert server.receive(answer) == 0
    with pytest.raises(MessageError, match="not expected now"):
        server.receive(answer)
    with pytest.raises(MessageError, match="of kind 'SealedShares', got 'Advertisement'"):
        server.receive(encode(made, 1, Advertisement(bytes(64), bytes(64))))


@pytest.mark.parametrize("stage", [ProtocolStage.ADVERTISE, ProtocolStage.AGREE])
def test_the_server_takes_no_forged_signature(stage):
    made = session(active=True, threshold=5)
    clients, server, incoming = conversation(made, stage)
    if stage == ProtocolStage.ADVERTISE:
        answer = lie(
            made, clients[0].advertise(), Advertisement, lambda m: replace(m, keys=bytes(64))
        )
    else:
        change = lambda m: SignedSurvivors(bytes(64))
        answer = lie(made, clients[0].receive(incoming[0]), SignedSurvivors, change)
    with pytest.raises(ForgedError, match="signature of client 0's"):
        server.receive(answer)


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_false_shares_end_the_session_and_give_no_false_sum(kind):
    made = session()
    clients, server, incoming = conversation(made, ProtocolStage.REVEAL, {(5, ProtocolStage.MASK)})
    victim = 3 if kind == "seeds" else 5

    def change(message):
        table = getattr(message, kind)
        return replace(message, **{kind: {**table, victim: bytes(32) + b"\1"}})

    for place, data in incoming.items():
        answer = clients[place].receive(data)
        server.receive(lie(made, answer, RevealedShares, change) if place == 0 else answer)
    with pytest.raises(AbortedError, match="false"):
        server.close_stage()
    with pytest.raises(AbortedError, match="there is no sum"):
        _ = server.total
    with pytest.raises(AbortedError, match="over"):
        server.close_stage()


def test_messages_of_another_session_are_refused():
    for changed in ({"round_index": 1}, {"bits": 31}, {"threshold": 5}, {"size": 4}):
        other = session(**changed)
        data = parties(other, vectors_of(other))[0][0].advertise()
        with pytest.raises(MessageError, match="another run, another round or other settings"):
            SecureServer(session()).receive(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 3}, "from 4 to 6, more than 1/2"),
        ({"threshold": 7}, "from 4 to 6"),
        ({"threshold": 4, "active": True}, "from 5 to 6, more than 2/3"),
        ({"num_neighbours": 6}, "even and from 2"),
        ({"num_neighbours": 4, "threshold": 6}, "from 2 to 5"),
        ({"num_neighbours": 4, "active": True}, "active: true needs every client"),
        ({"num_clients": 1}, "num_clients"),
        ({"min_survivors": 3}, "min_survivors must be from 4"),
        ({"round_index": -1}, "round_index"),
        ({"bits": 0}, "bits"),
    ],
)
def test_impossible_sessions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        session(**options)


def test_impossible_clients_and_cases_are_refused():
    made, vector = session(bits=8), np.zeros(3, np.uint8)
    for place, values, message in (
        (6, vector, "place must be from 0 to 5"),
        (0, vector[:2], "shape"),
        (0, np.full(3, 256), "from 0 to 2"),
        (0, np.zeros(3), "vector of integers"),
    ):
        with pytest.raises(ValueError, match=message):
            SecureClient(made, place, values, used={})
    active = session(active=True, threshold=5)
    with pytest.raises(ValueError, match="signing_key and directory"):
        SecureClient(active, 0, np.zeros(3, np.uint32), used={})
    with pytest.raises(ValueError, match="needs directory"):
        SecureServer(active)
    with pytest.raises(ValueError, match="dropouts must be"):
        simulate(made, vectors_of(made), {0: ProtocolStage.AGREE})
    with pytest.raises(ValueError, match="places 0 to 5"):
        simulate(made, {0: vector})


def test_a_seed_repeats_every_byte():
    made = session()
    runs = [conversation(made, ProtocolStage.REVEAL)[2] for _ in range(2)]
    assert runs[0] == runs[1]
    one, two = (parties(made, vectors_of(made))[0][0].advertise() for _ in range(2))
    assert one == two
    assert SecureClient(made, 0, vectors_of(made)[0], used={}).advertise() != one
