"""Robust rules: printed vectors to their digits, properties, and what is refused.

Vectors are byzfl's; `test_oracles` compares with flwr and scipy. Where those differ from the papers, ours
is the paper's.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_of_updates import aggregate, new_server, sines

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.server.robust.krum import (
    Bulyan,
    Krum,
    MultiKrum,
    krum_choices,
    mean_around_median,
)
from fl_lightning.server.robust.reweighted import (
    CentredClipping,
    FLTrust,
    GeometricMedian,
    NormBounding,
)
from fl_lightning.server.robust.rule import Bucketing, Median, NearestNeighbourMixing, TrimmedMean

RULES = [
    Median(),
    TrimmedMean(2),
    Krum(2),
    MultiKrum(2),
    MultiKrum(2, num_kept=3),
    Bulyan(2),
    GeometricMedian(),
    CentredClipping(radius=2.0, num_iterations=3),
    NormBounding(),
    NormBounding(bound=1.5),
    NearestNeighbourMixing(TrimmedMean(2), 2),
    NearestNeighbourMixing(GeometricMedian(), 2),
]
PULLED_TO_ZERO = (CentredClipping, NormBounding)  # not equivariant under shifts
few = settings(max_examples=12)
numbers = st.floats(-100, 100, width=32)
rounds = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=11, max_size=13)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # byzfl, which is not among the tools; what flwr and scipy know is in `test_oracles`
        (CentredClipping(1.0, 1), [0.033825, 0.186388, 0.065236, 0.126545]),
        (CentredClipping(1.0, 5), [0.224902, 0.605728, 0.389933, 0.336159]),
        (NearestNeighbourMixing(TrimmedMean(2), 2), [0.068539, 0.121123, 0.114091, 0.050903]),
    ],
)
def test_nine_sines_to_the_printed_digits(rule, expected):
    np.testing.assert_allclose(aggregate(rule, sines()), expected, atol=5.01e-7)


@few
@given(rows=rounds, values=st.permutations(range(13)))
@pytest.mark.parametrize("rule", [Median(), TrimmedMean(2), GeometricMedian()], ids=str)
def test_it_does_not_matter_whose_update_is_whose(rule, rows, values):
    shuffled = [rows[i] for i in values if i < len(rows)]
    alike = [1] * len(rows)
    np.testing.assert_allclose(
        aggregate(rule, shuffled, alike), aggregate(rule, rows, alike), rtol=1e-6, atol=1e-5
    )


@few
@given(row=st.lists(numbers, min_size=3, max_size=3), count=st.integers(11, 13))
@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, PULLED_TO_ZERO)], ids=str)
def test_equal_updates_are_their_own_aggregate(rule, row, count):
    np.testing.assert_allclose(aggregate(rule, [row] * count), row, rtol=1e-9, atol=1e-12)


@few
@given(rows=rounds, size=st.sampled_from([1e6, 1e30, -1e6]))
@pytest.mark.parametrize(
    "rule", [Median(), TrimmedMean(2), Krum(2), MultiKrum(2), Bulyan(2)], ids=str
)
def test_a_few_huge_updates_leave_the_aggregate_among_the_others(rule, rows, size):
    attacked = np.array(rows)
    attacked[3], attacked[7] = size, -size
    honest = np.delete(attacked, [3, 7], axis=0)
    found = aggregate(rule, attacked)
    slack = 1e-5 * (1 + np.abs(honest).max())
    assert (honest.min(0) - slack <= found).all()
    assert (found <= honest.max(0) + slack).all()


@pytest.mark.parametrize("size", [1e3, 1e12, 1e30])
@pytest.mark.parametrize(
    "rule",
    [GeometricMedian(), CentredClipping(9.0, 5), NearestNeighbourMixing(GeometricMedian(), 2)],
    ids=str,
)
def test_huge_updates_have_little_influence_in_single_precision_as_well(rule, size):
    honest = np.random.default_rng(0).normal(1.0, 0.1, (9, 50))
    rows = np.concatenate([honest, np.full((2, 50), size)])
    found = aggregate(rule, rows, dtype=torch.float32)
    assert np.abs(found - honest.mean(0)).max() < 0.35


def nearest_to_the_median(column, count):
    """By a sort of the distances; of equal ones the first rows'."""
    order = np.argsort(np.abs(column - np.median(column)), kind="stable")
    return column[order[:count]].mean()


@settings(max_examples=200)
@given(
    rows=st.integers(3, 14).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-3, 3) | numbers, min_size=n, max_size=n), min_size=1, max_size=9
        )
    ),
    count=st.integers(1, 14),
)
def test_bulyan_takes_the_values_nearest_to_the_median(rows, count):
    """Whole numbers, as quantised updates have, are often equally far from the median."""
    block = np.array(rows, float).T
    count = min(count, len(block))
    found = mean_around_median(block, np.sort(block, axis=0), count)
    expected = [nearest_to_the_median(column, count) for column in block.T]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@few
@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=40, max_size=40), min_size=7, max_size=9)
)
def test_bulyan_of_whole_numbers_in_single_precision(rows):
    found = aggregate(Bulyan(1), rows, dtype=torch.float32)
    distances = ((np.array(rows)[:, None] - np.array(rows)) ** 2).sum(-1).astype(float)
    chosen = np.array(rows, float)[krum_choices(distances, len(rows) - 2, 1)]
    expected = [nearest_to_the_median(column, len(rows) - 4) for column in chosen.T]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


class TestCentredClipping:
    def test_the_centre_is_the_last_rounds_aggregate(self):
        server = new_server(CentredClipping(radius=1.0), 1)
        assert aggregate(None, [[4.0]], server=server).tolist() == [1.0]
        assert aggregate(None, [[4.0]], server=server).tolist() == [2.0]
        assert server.state_dict()["memory"]["centre"].tolist() == [2.0]

    def test_a_resumed_server_has_the_centre_and_a_new_one_has_not(self):
        rule = CentredClipping(radius=1.0)
        first, resumed = new_server(rule, 1), new_server(rule, 1)
        aggregate(None, [[4.0]], server=first)
        resumed.load_state_dict(first.state_dict())
        assert aggregate(None, [[4.0]], server=resumed).tolist() == [2.0]
        assert aggregate(rule, [[4.0]]).tolist() == [1.0]

    def test_the_centre_follows_a_new_mask(self):
        server = new_server(CentredClipping(radius=1.0), 2)
        aggregate(None, [[0.0, 4.0]], server=server)
        model = GlobalModel(torch.zeros(2).double(), torch.empty(0).double())
        server.relocate(model, torch.tensor([1, -1]))
        assert server.state_dict()["memory"]["centre"].tolist() == [1.0, 0.0]


class TestNormBounding:
    def test_long_updates_are_shortened_to_the_bound(self):
        found = aggregate(NormBounding(bound=5.0), [[3.0, 4.0], [30.0, 40.0]])
        np.testing.assert_allclose(found, [3.0, 4.0])

    def test_the_bound_may_be_the_median_norm(self):
        found = aggregate(NormBounding(), [[1.0], [2.0], [99.0]])
        np.testing.assert_allclose(found, [5 / 3])

    def test_examples_may_count(self):
        rule = NormBounding(bound=10.0, weight_by_examples=True)
        np.testing.assert_allclose(aggregate(rule, [[1.0], [4.0]], [1, 2]), [3.0])


class TestFLTrust:
    def test_by_hand(self):
        """cos 1 and 0.6, norms set to 2; who points away is not heard, nor the trusted one."""
        rows = [[2.0, 0.0], [7.0, 0.0], [3.0, 4.0], [-5.0, 1.0]]
        expected = (1.0 * np.array([2.0, 0.0]) + 0.6 * np.array([1.2, 1.6])) / 1.6
        np.testing.assert_allclose(aggregate(FLTrust(0), rows), expected)

    def test_nobody_trusted_moves_nothing(self):
        assert aggregate(FLTrust(1), [[1.0], [-1.0], [1.0]]).tolist() == [0.0]

    def test_the_trusted_client_must_take_part(self):
        with pytest.raises(RoundFailure, match="client 7, which is not in this round"):
            aggregate(FLTrust(7), [[1.0], [2.0]])


class TestBucketing:
    def test_buckets_are_means_of_a_random_order_that_changes_with_the_round(self):
        server = new_server(Bucketing(Median(), bucket_size=3, seed=0), 1)
        rows, found = np.arange(9.0)[:, None] ** 2, set()
        for index in range(8):
            server.open_round(index)
            for client, row in enumerate(rows):
                server.receive(ClientUpdate(client, torch.tensor(row), torch.empty(0), 1, 1))
            found.add(round(float(server.close_round()), 6))
        assert len(found) > 3
        assert all(1 < value < 60 for value in found)

    @few
    @given(rows=rounds, size=st.integers(1, 5))
    def test_of_means_it_is_the_mean_where_buckets_are_equal(self, rows, size):
        rows = rows[: len(rows) // size * size]
        found = aggregate(Bucketing(TrimmedMean(0), bucket_size=size, seed=0), rows)
        np.testing.assert_allclose(found, np.mean(rows, 0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (TrimmedMean(2), 5),
        (Krum(2), 7),
        (MultiKrum(1, num_kept=8), 8),
        (Bulyan(2), 11),
        (NearestNeighbourMixing(Median(), 2), 5),
        (NearestNeighbourMixing(Krum(3), 2), 9),
        (Bucketing(Krum(1), bucket_size=2), 9),
        (FLTrust(), 2),
    ],
    ids=str,
)
def test_too_few_updates_are_refused(rule, needed):
    aggregate(rule, np.ones((needed, 2)))
    with pytest.raises(RoundFailure, match=f"needs at least {needed} updates, got {needed - 1}"):
        aggregate(rule, np.ones((needed - 1, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NearestNeighbourMixing(FLTrust(), 1), "several clients"),
        (lambda: Bucketing(FLTrust()), "several clients"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
