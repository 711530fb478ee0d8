"""Pads, keys, boxes, shares and graphs: published vectors, and what must not be possible."""

import itertools
import random

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fl_lightning.secure.entropy import seeded_entropy, system_entropy
from fl_lightning.secure.protocol.keys import (
    CHUNK,
    AgreementKey,
    ForgedError,
    Signatures,
    add_pad,
    seal,
    unseal,
)
from fl_lightning.secure.protocol.session import Session, SparseGraph, neighbours, neighbours_of
from fl_lightning.secure.protocol.shamir import PRIME, combine, split
from fl_lightning.secure.ring import Ring


def pad(key, count, ring):
    total = np.zeros(count, ring.dtype)
    add_pad(total, key, ring)
    return ring.reduced(total)


def test_pads_are_the_keystream_of_rfc_8439():
    # section 2.3.2 has counter 1 and a nonce of its own; appendix A.1 has zeros: vectors 1 and 2
    first, second = "76b8e0ada0f13d90405d6ae55386bd28", "9f07e7be5551387a98ba977c732d080d"
    keystream = pad(bytes(32), 128, Ring(8)).tobytes()
    assert keystream[:16].hex() == first
    assert keystream[64:80].hex() == second
    for bits in (16, 32, 64):
        assert pad(bytes(32), 1024 // bits, Ring(bits)).tobytes() == keystream


@pytest.mark.parametrize("bits", [5, 20, 64])
def test_pads_go_on_over_chunks_and_cancel(bits):
    ring, count = Ring(bits), 2 * CHUNK // Ring(bits).dtype.itemsize + 3
    whole = pad(b"k" * 32, count, ring)
    assert np.array_equal(whole[:100], pad(b"k" * 32, 100, ring))
    assert len(np.unique(whole[-(CHUNK // ring.dtype.itemsize) :])) > 1
    values = ring.reduced(np.arange(count).astype(ring.dtype))
    total = values.copy()
    add_pad(total, b"k" * 32, ring)
    assert not np.array_equal(ring.reduced(total), values)
    add_pad(total, b"k" * 32, ring, subtract=True)
    assert np.array_equal(ring.reduced(total), values)


@pytest.mark.parametrize("bits", [20, 64])
def test_pads_pass_a_chi_square_test(bits):
    ring = Ring(bits)
    values = pad(b"chi" + bytes(29), 200_000, ring)
    shifts = [0, bits - 8]  # the lowest and the highest eight bits
    for shift in shifts:
        octets = ((values >> ring.dtype.type(shift)) & 255).astype(np.int64)
        counts = np.bincount(octets, minlength=256)
        assert 1e-4 < chisquare(counts).pvalue < 1 - 1e-4


def test_one_bit_of_the_key_changes_half_of_the_pad():
    one = pad(bytes(32), 100_000, Ring(32))
    other = pad(b"\1" + bytes(31), 100_000, Ring(32))
    changed = np.unpackbits((one ^ other).view(np.uint8)).mean()
    assert abs(changed - 0.5) < 4 * 0.5 / 3.2e6**0.5


def test_x25519_as_in_rfc_7748():
    # section 5.2: the base point times 9, once
    nine = AgreementKey((9).to_bytes(32, "little"))
    assert nine.public.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"


def test_secrets_differ_with_everything_in_their_context():
    keys = [AgreementKey(bytes([n]) * 32) for n in range(3)]
    secrets = {
        keys[me].secret_with(keys[peer].public, purpose, context, me=me, peer=peer)
        for me, peer in ((0, 1), (0, 2), (1, 2))
        for purpose in ("pads", "shares")
        for context in (b"round 1", b"round 2")
    }
    secrets.add(keys[0].secret_with(keys[1].public, "pads", b"round 1", me=0, peer=5))
    assert len(secrets) == 13


def test_keys_without_a_secret_are_refused_and_private_ones_not_shown():
    key = AgreementKey(b"k" * 32)
    with pytest.raises(ValueError, match="client 4 is of low order"):
        key.secret_with(bytes(32), "pads", b"", me=0, peer=4)
    assert key.public.hex() in repr(key)
    assert "6b6b6b" not in repr(key)


@given(st.integers(0, 8 * 26 - 1))
def test_a_changed_box_or_signature_is_seen(bit):
    box = bytearray(seal(b"k" * 32, b"ten bytes!", b"c", sender=1, receiver=2))
    settings = {"num_clients": 4, "size": 1, "threshold": 3, "active": True}
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    directory = {1: key.public_key().public_bytes_raw()}
    signatures = Signatures(Session(run="demo", round_index=0, **settings), directory, key)
    signature = bytearray(signatures.sign("keys", 1, b"content"))
    for changed in (box, signature):
        changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ForgedError, match="from client 1 to client 2 is forged"):
        unseal(b"k" * 32, bytes(box), b"c", sender=1, receiver=2)
    with pytest.raises(ForgedError, match="the signature of client 1's keys is wrong"):
        signatures.check("keys", 1, b"content", bytes(signature))


@settings(max_examples=25)
@given(st.integers(1, 20), st.integers(0, 10), st.binary(min_size=32, max_size=32), st.randoms())
def test_enough_shares_tell_any_secret(threshold, extra, secret, chance):
    places = chance.sample(range(1, 10**6), threshold + extra)
    shares = split(secret, places, threshold, seeded_entropy(0, "shares", threshold))
    some = chance.sample(places, chance.randint(threshold, len(places)))
    assert combine({x: shares[x] for x in some}, threshold) == secret
    few = dict(list(shares.items())[: threshold - 1])
    with pytest.raises(ValueError, match=f"{len(few)} shares of the {threshold}"):
        combine(few, threshold)


def test_one_share_less_fits_every_secret():
    """t - 1 shares and any secret are t points, and through these goes a polynomial."""
    shares = split(b"s" * 32, (1, 2), 2, system_entropy)
    for guess in (0, 1, 2**256 - 1):
        # the line through (0, guess) and share 1 gives this share 2
        fitting = (2 * shares[1] - guess) % PRIME
        assert combine({1: shares[1], 2: fitting}, 2) == guess.to_bytes(32, "little")


def test_false_shares_are_seen_where_there_are_more_than_needed():
    shares = split(b"s" * 32, range(1, 8), 4, system_entropy)
    for x in shares:
        with pytest.raises(ValueError, match="at least one is false"):
            combine(shares | {x: (shares[x] + 1) % PRIME}, 4)


def test_impossible_shares_are_refused():
    for secret, places, threshold, message in (
        (bytes(31), [1, 2], 2, "32 bytes"),
        (bytes(32), [1, 1], 2, "distinct"),
        (bytes(32), [0, 1], 2, "distinct"),
        (bytes(32), [1, 2], 3, "threshold"),
        (bytes(32), [1, 2], 0, "threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            split(secret, places, threshold, system_entropy)


@given(st.sets(st.integers(0, 99), min_size=2), st.integers(1, 20), st.integers(0, 3))
def test_graphs_are_symmetric_and_regular(places, half, seed):
    graph = neighbours(places, 2 * half, seed)
    assert graph.keys() == places
    for place, near in graph.items():
        assert len(near) == min(2 * half, len(places) - 1)
        assert place not in near
        assert all(place in graph[peer] for peer in near)
        assert neighbours_of(place, places, 2 * half, seed) == near
    assert neighbours(places, 2 * half, seed) == graph


def connected(graph, alive):
    reached, todo = set(), [min(alive)]
    while todo:
        place = todo.pop()
        if place not in reached:
            reached.add(place)
            todo += graph[place] & alive
    return reached == alive


def test_a_graph_falls_apart_only_where_two_runs_are_missing():
    graph, chance = neighbours(range(12), 4, seed=0), random.Random(0)
    apart = 0
    for count in range(11):
        for gone in itertools.combinations(range(12), count):
            if chance.random() < 0.3:
                apart += not connected(graph, frozenset(range(12)) - set(gone))
                assert count >= 4 or connected(graph, frozenset(range(12)) - set(gone))
    assert apart


def test_the_plan_keeps_its_promise_where_it_can_be_counted():
    plan = SparseGraph(corrupt=0.1, dropped=0.2, security_bits=4, correctness_bits=4)
    k, threshold = plan.plan(60)
    assert k < 59
    rng, lost, leaked = np.random.default_rng(0), 0, 0
    for seed in range(400):
        graph = neighbours(range(60), k, seed)
        order = rng.permutation(60).tolist()
        corrupt, gone = frozenset(order[:6]), frozenset(order[6:18])
        alive = frozenset(range(60)) - gone
        lost += any(len(graph[place] & alive) < threshold for place in graph)
        leaked += not connected(graph, alive - corrupt)
        leaked += any(len(graph[place] & corrupt) >= threshold for place in graph)
    assert lost <= 400 / 2**4
    assert leaked <= 400 / 2**4


def test_the_number_of_neighbours_grows_like_a_logarithm():
    degrees = [SparseGraph().plan(n)[0] for n in (10**3, 10**4, 10**5, 10**6)]
    assert degrees == sorted(degrees)
    assert degrees[-1] <= 2 * degrees[0]
    assert SparseGraph().plan(6) == (5, 4)
    with pytest.raises(ValueError, match="corrupt and dropped"):
        SparseGraph(corrupt=0.5, dropped=0.5)
