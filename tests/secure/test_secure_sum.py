"""A secure sum a round: real updates in, their mean out, and bytes known beforehand."""

import numpy as np
import pytest

from fl_lightning.secure.protocol.session import AbortedError, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum

CLIENTS = [3, 1000, 17, 4, 2**40, 0, 11, 8]


def updates(size=4, bits=32):
    rng = np.random.default_rng(0)
    return {c: rng.integers(0, 2**bits, size).astype(np.uint32) for c in CLIENTS}


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("run", {"active": True}), ("count", {}), ("run", {"threshold": 0.5})],
)
def test_the_sum_is_that_of_those_who_stay(protocol, options):
    vectors = updates()
    stay = {c: v for c, v in vectors.items() if c != 17}
    outcome = SecureSum(protocol=protocol, **options)(stay, [17], round_index=3, seed=0)
    assert outcome.survivors == set(CLIENTS) - {17}
    assert np.array_equal(outcome.total, sum(vectors[c] for c in CLIENTS if c != 17))
    assert outcome.cost.bytes_up.keys() == set(CLIENTS)
    assert outcome.cost.bytes_up[17] < outcome.cost.bytes_up[0]


def test_both_protocols_count_the_same_bytes_which_are_known_beforehand():
    vectors = updates()
    run, count = (
        SecureSum(protocol=protocol)(vectors, round_index=0, seed=0).cost
        for protocol in ("run", "count")
    )
    assert (run.bytes_up, run.bytes_down) == (count.bytes_up, count.bytes_down)
    up, down = SecureSum().typical_bytes(4, len(CLIENTS))
    assert (set(run.bytes_up.values()), set(run.bytes_down.values())) == ({up}, {down})
    large, empty = (SecureSum(bits=20).typical_bytes(size, 50)[0] for size in (10**6, 0))
    assert 0 <= large - empty - 2_500_000 <= 16  # digits of the length in the header


def test_with_a_sparse_graph_bytes_hardly_grow_with_the_cohort():
    sparse = SecureSum(sparse=SparseGraph())
    assert sparse.typical_bytes(0, 600)[0] < 1.3 * sparse.typical_bytes(0, 300)[0]
    assert SecureSum().typical_bytes(0, 400)[0] > 1.9 * SecureSum().typical_bytes(0, 200)[0]
    rng = np.random.default_rng(0)
    vectors = {c: rng.integers(0, 2**32, 5).astype(np.uint32) for c in range(40)}
    del vectors[5]
    outcome = SecureSum(sparse=SparseGraph())(vectors, [5], round_index=0, seed=0)
    assert np.array_equal(outcome.total, sum(vectors.values()))


def test_cohorts_that_are_too_small():
    vectors = updates()
    with pytest.raises(ValueError, match="num_clients"):
        SecureSum()({1: vectors[3]}, round_index=0, seed=0)
    few = {c: vectors[c] for c in CLIENTS[:5]}
    with pytest.raises(AbortedError, match="at least 6 must"):
        SecureSum()(few, CLIENTS[5:], round_index=0, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.4}, "threshold must be from 0.5"),
        ({"threshold": 0.5, "active": True}, "threshold must be from 0.667"),
        ({"threshold": 1.0}, "threshold"),
        ({"active": True, "sparse": SparseGraph()}, "leave sparse out"),
        ({"protocol": "fast"}, "protocol must be"),
        ({"bits": 65}, "bits"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SecureSum(**options)


def test_every_cohort_has_a_session():
    for secure_sum in (SecureSum(), SecureSum(active=True), SecureSum(sparse=SparseGraph())):
        assert all(secure_sum.session(n, size=1).threshold <= n for n in range(2, 40))
