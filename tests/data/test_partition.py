"""Partitions: what every rule promises, what each adds, closed limits, measured cases, messages."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClass, DirichletPerClient
from fl_lightning.data.partitions.label_shards import (
    LabelShards,
    McMahanShards,
    class_slots,
    draw_holders,
    even_counts,
    size_excess,
)
from fl_lightning.data.partitions.partition import (
    IID,
    DirichletSizes,
    NaturalPartition,
    PowerLawSizes,
    proportional_sizes,
)

RULES = [
    IID(),
    LabelShards(classes_per_client=2),
    McMahanShards(shards_per_client=2),
    DirichletPerClass(alpha=1.0),
    DirichletPerClient(alpha=0.3),
    DirichletSizes(alpha=0.5),
    PowerLawSizes(exponent=1.2),
]
EQUAL_SIZES = [IID(), DirichletPerClient(alpha=0.01), DirichletPerClient(alpha=10.0)]
CIFAR100 = np.repeat(np.arange(100), 500)
MNIST_SIZES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST = np.repeat(np.arange(10), MNIST_SIZES)
DIGITS = load_digits().target


def kind(rule):
    return type(rule).__name__


def sizes(shards):
    return np.array([len(shard) for shard in shards])


def num_classes(shards, labels):
    return np.array([len(np.unique(labels[np.asarray(shard)])) for shard in shards])


def assert_disjoint_cover(shards, num_examples, num_clients):
    assert len(shards) == num_clients
    assert all(shard.dtype == torch.int64 and shard.ndim == 1 for shard in shards)
    np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(num_examples))


@st.composite
def federations(draw):
    """Labels (any number of classes ≥ 2, gaps between them, uneven, shuffled), clients, a seed."""
    class_sizes = draw(st.lists(st.integers(20, 60), min_size=2, max_size=8))
    values = draw(st.lists(st.integers(-50, 50), min_size=8, max_size=8, unique=True))
    labels = np.repeat(values[: len(class_sizes)], class_sizes)
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(labels)
    return labels, draw(st.integers(4, 12)), draw(st.integers(0, 2**31))


@pytest.mark.parametrize("rule", RULES, ids=kind)
class TestEveryRule:
    @given(federation=federations())
    @settings(max_examples=15)
    def test_is_a_disjoint_cover_without_empty_clients(self, rule, federation):
        labels, num_clients, seed = federation
        shards = rule.assign(labels, num_clients, seed)
        assert_disjoint_cover(shards, len(labels), num_clients)
        assert sizes(shards).min() >= 1

    def test_the_seed_decides(self, rule):
        first, again, other = (rule.assign(DIGITS, 20, seed) for seed in (1, 1, 2))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))

    def test_refuses_no_clients_and_more_than_examples(self, rule):
        for num_clients, says in [(6, "more clients than examples"), (0, "at least 1"), (-1, "at")]:
            with pytest.raises(ConfigurationError, match=says):
                rule.assign(np.arange(5) % 2, num_clients, 0)


@pytest.mark.parametrize("rule", EQUAL_SIZES, ids=repr)
@given(federation=federations())
@settings(max_examples=25)
def test_sizes_within_one(rule, federation):
    labels, num_clients, seed = federation
    assert np.ptp(sizes(rule.assign(labels, num_clients, seed))) <= 1


def test_iid_clients_see_the_global_histogram():
    shards = IID().assign(CIFAR100 // 10, 10, 0)
    histograms = np.array([np.bincount(CIFAR100[shard] // 10) for shard in shards])
    np.testing.assert_allclose(histograms, 500, atol=110)  # five standard deviations


class TestLabelShards:
    @pytest.mark.parametrize(
        ("labels", "num_clients", "wanted"),
        [
            *((CIFAR100, 100, wanted) for wanted in (1, 5, 50)),
            # clients that divide neither classes nor examples
            *((MNIST, *row) for row in ((7, 3), (13, 2), (37, 9), (2000, 2))),
        ],
        ids=lambda value: "labels" if isinstance(value, np.ndarray) else str(value),
    )
    def test_of_known_sets_sizes_and_classes_are_as_asked(self, labels, num_clients, wanted):
        shards = LabelShards(classes_per_client=wanted).assign(labels, num_clients, 0)
        assert_disjoint_cover(shards, len(labels), num_clients)
        assert np.ptp(sizes(shards)) <= 1
        assert set(num_classes(shards, labels)) == {wanted}
        if labels is CIFAR100:  # classes are equal, so that each gives all of its holders as many
            counts = np.array([np.bincount(labels[shard], minlength=100) for shard in shards])
            assert set(counts[counts > 0]) == {500 // wanted}

    @given(federation=federations(), data=st.data())
    @settings(max_examples=30)
    def test_exactly_so_many_classes_whatever_their_sizes(self, federation, data):
        labels, num_clients, seed = federation
        total = len(np.unique(labels))
        least = -(-total // num_clients)
        wanted = data.draw(st.integers(least, total))
        shards = LabelShards(classes_per_client=wanted).assign(labels, num_clients, seed)
        assert_disjoint_cover(shards, len(labels), num_clients)
        assert set(num_classes(shards, labels)) == {wanted}

    @given(
        total=st.integers(2, 12),
        per_class=st.integers(40, 80),
        multiple=st.integers(1, 3),
        data=st.data(),
    )
    @settings(max_examples=30)
    def test_balanced_classes_give_sizes_within_one(self, total, per_class, multiple, data):
        wanted = data.draw(st.integers(1, total))
        labels = np.tile(np.arange(total) * 3 - 7, per_class)
        shards = LabelShards(classes_per_client=wanted).assign(labels, total * multiple, 0)
        assert np.ptp(sizes(shards)) <= 1
        assert set(num_classes(shards, labels)) == {wanted}

    def test_where_equal_is_impossible_few_examples_are_out_of_place(self):
        labels = np.repeat([0, 1], [30, 70])  # by hand: one client for 30, three for 70
        shards = LabelShards(classes_per_client=1).assign(labels, 4, 0)
        assert sorted(sizes(shards)) == [23, 23, 24, 30]

    def test_every_class_has_as_many_clients_as_it_has_examples_at_most(self):
        labels = np.repeat([0, 1, 2], [50, 50, 2])
        shards = LabelShards(classes_per_client=2).assign(labels, 10, 0)
        assert set(num_classes(shards, labels)) == {2}


@st.composite
def class_graphs(draw):
    """Three clients with two of three small classes each."""
    pairs = st.sampled_from([(0, 1), (0, 2), (1, 2)])
    holders = np.array(draw(st.tuples(pairs, pairs, pairs).filter(lambda h: len(set(h)) > 1)))
    spare = np.array(draw(st.tuples(*[st.integers(0, 3)] * 3)))
    return holders, np.bincount(holders.ravel(), minlength=3) + spare


def all_counts(holders, class_sizes):
    """Every way to split each class over its holders, at least one example each."""
    splits = []
    for klass, size in enumerate(class_sizes):
        clients = np.flatnonzero((holders == klass).any(axis=1))
        splits.append(
            [
                (clients, klass, np.array(numbers))
                for numbers in itertools.product(range(1, size + 1), repeat=len(clients))
                if sum(numbers) == size
            ]
        )
    for split in itertools.product(*splits):
        counts = np.zeros((len(holders), len(class_sizes)), dtype=np.int64)
        for clients, klass, numbers in split:
            counts[clients, klass] = numbers
        yield counts


class TestClassGraph:
    @given(graph=class_graphs())
    @settings(max_examples=12)
    def test_even_counts_are_the_best_of_all(self, graph):
        holders, class_sizes = graph
        share = class_sizes // np.bincount(holders.ravel())

        def cost(counts):
            return size_excess(counts), int(np.abs(counts - share)[counts > 0].sum())

        found = even_counts(holders, class_sizes)
        assert (found.sum(axis=0) == class_sizes).all()
        assert [set(np.flatnonzero(row)) for row in found] == [set(row) for row in holders]
        assert cost(found) == min(map(cost, all_counts(holders, class_sizes)))

    @given(
        class_sizes=st.lists(st.integers(20, 500), min_size=2, max_size=9),
        num_clients=st.integers(9, 20),
        data=st.data(),
    )
    @settings(max_examples=30)
    def test_slots_are_used_up_by_distinct_classes(self, class_sizes, num_clients, data):
        wanted = data.draw(st.integers(1, len(class_sizes)))
        rng = np.random.default_rng(0)
        slots = class_slots(np.array(class_sizes), num_clients, wanted, rng)
        holders = draw_holders(slots, num_clients, rng)
        assert holders.shape == (num_clients, wanted)
        assert all(len(set(row)) == wanted for row in holders)
        np.testing.assert_array_equal(np.bincount(holders.ravel()), slots)

    def test_slots_are_in_proportion_and_the_excess_by_hand(self):
        slots = class_slots(np.array([100, 200, 300]), 12, 1, np.random.default_rng(0))
        assert slots.tolist() == [2, 4, 6]
        assert size_excess(np.array([[3], [4], [4]])) == 0
        assert size_excess(np.array([[2], [4], [5]])) == 2  # one too few, one too many
        assert size_excess(np.array([[2], [4]])) == 2


class TestMcMahanShards:
    def test_the_papers_case(self):
        shards = McMahanShards().assign(np.repeat(np.arange(10), 6000), 100, 0)
        assert set(sizes(shards)) == {600}
        assert num_classes(shards, np.repeat(np.arange(10), 6000)).max() == 2

    @given(federation=federations())
    @settings(max_examples=25)
    def test_sizes_within_the_number_of_pieces(self, federation):
        labels, num_clients, seed = federation
        assert np.ptp(sizes(McMahanShards().assign(labels, num_clients, seed))) <= 2


class TestDirichletPerClass:
    def test_large_alpha_splits_every_class_evenly(self):
        shards = DirichletPerClass(alpha=1e6).assign(MNIST, 10, 0)
        counts = np.array([np.bincount(MNIST[shard]) for shard in shards])
        np.testing.assert_allclose(counts, np.tile(MNIST_SIZES, (10, 1)) / 10, rtol=0.01)

    def test_small_alpha_gives_a_class_to_one_client(self):
        shards = DirichletPerClass(alpha=1e-3).assign(MNIST, 3, 0)
        counts = np.array([np.bincount(MNIST[shard], minlength=10) for shard in shards])
        assert (counts.max(axis=0) >= 0.99 * np.array(MNIST_SIZES)).sum() >= 9

    def test_the_expected_share_is_one_kth(self):
        rule = DirichletPerClass(alpha=0.5)
        mean = np.mean([sizes(rule.assign(CIFAR100, 5, seed)) for seed in range(20)], axis=0)
        np.testing.assert_allclose(mean, 10_000, rtol=0.05)

    def test_redraws_until_all_are_large_enough(self):
        rule = DirichletPerClass(alpha=0.1, min_examples=100)
        assert sizes(rule.assign(MNIST, 30, 0)).min() >= 100


def one_by_one(alpha, rng, num_runs=2000):
    """Hsu et al.'s rule, example by example, in many runs at once: classes of 4, 3, 3, two clients.

    Returns how often [client, class, n] is so, where n is how many of the class the client has.
    """
    left, seen = np.tile([4, 3, 3], (num_runs, 1)), np.zeros((2, 3, 6))
    for client in range(2):
        mix, before = rng.dirichlet(alpha * np.array([0.4, 0.3, 0.3]), num_runs), left.copy()
        for _ in range(5):
            chances = np.where(left > 0, mix, 0.0).cumsum(axis=1)
            chosen = (chances < chances[:, -1:] * rng.random((num_runs, 1))).sum(axis=1)
            left[range(num_runs), chosen] -= 1
        for klass in range(3):
            counts = np.bincount((before - left)[:, klass], minlength=6)
            seen[client, klass] = counts / num_runs
    return seen


class TestDirichletPerClient:
    def test_has_the_distribution_of_drawing_one_by_one(self):
        labels, ours = np.repeat([0, 1, 2], [4, 3, 3]), np.zeros((2, 3, 6))
        rule = DirichletPerClient(alpha=2.0)
        for seed in range(2000):
            for client, shard in enumerate(rule.assign(labels, 2, seed)):
                ours[client, range(3), np.bincount(labels[np.asarray(shard)], minlength=3)] += 1
        plain = one_by_one(2.0, np.random.default_rng(0))
        np.testing.assert_allclose(ours / 2000, plain, atol=0.05)

    def test_large_alpha_gives_the_global_histogram(self):
        shards = DirichletPerClient(alpha=1e6).assign(MNIST, 10, 0)
        share = np.array([np.bincount(MNIST[shard]) / 6000 for shard in shards])
        np.testing.assert_allclose(share, np.tile(MNIST_SIZES, (10, 1)) / 60_000, atol=0.03)

    def test_small_alpha_gives_very_few_classes(self):
        shards = DirichletPerClient(alpha=1e-3).assign(CIFAR100, 100, 0)
        assert np.median(num_classes(shards, CIFAR100)) <= 3
        # a client of 500 from classes of 500: only leftovers make it more than one class
        shards = DirichletPerClient(alpha=1e-100).assign(CIFAR100, 200, 0)
        assert num_classes(shards, CIFAR100).tolist() == [1] * 200


class TestQuantitySkew:
    def test_power_law_by_hand(self):
        shards = PowerLawSizes(exponent=2.0).assign(np.zeros(490), 3, 0)
        assert sorted(sizes(shards)) == [40, 90, 360]

    def test_ranks_are_drawn(self):
        rule = PowerLawSizes(exponent=1.0)
        largest = {int(np.argmax(sizes(rule.assign(DIGITS, 5, seed)))) for seed in range(30)}
        assert largest == set(range(5))

    def test_alpha_sets_the_spread(self):
        wide, narrow = (
            np.std(sizes(DirichletSizes(alpha=alpha).assign(MNIST, 20, 0))) for alpha in (0.1, 1e6)
        )
        assert wide > 1000
        assert narrow < 30

    def test_examples_are_iid(self):
        shards = DirichletSizes(alpha=5.0).assign(MNIST, 5, 0)
        assert set(num_classes(shards, MNIST)) == {10}

    @given(
        shares=st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda s: sum(s) > 1e-3),
        spare=st.integers(0, 500),
        least=st.integers(1, 5),
    )
    def test_sizes_keep_total_minimum_and_order(self, shares, spare, least):
        total = least * len(shares) + spare
        found = proportional_sizes(np.array(shares), total, least)
        assert found.sum() == total
        assert found.min() >= least
        assert (np.diff(found[np.argsort(shares, kind="stable")]) >= -1).all()

    def test_keeps_the_minimum(self):
        for rule in (DirichletSizes(alpha=0.05, min_examples=9), PowerLawSizes(exponent=9.0)):
            assert sizes(rule.assign(DIGITS, 50, 0)).min() == rule.min_examples

    def test_exponent_zero_is_equal(self):
        assert np.ptp(sizes(PowerLawSizes(exponent=0.0).assign(np.zeros(101), 7, 0))) == 1


def test_natural_clients_are_numbered_by_sorted_values():
    writers = np.array([7, -3, 7, 12, -3])
    shards = NaturalPartition(attribute="writer").assign(writers, 3, 0)
    assert [shard.tolist() for shard in shards] == [[1, 4], [0, 2], [3]]


WAY_OUT = "Raise alpha, lower min_examples"


@pytest.mark.parametrize(
    ("rule", "labels", "num_clients", "message"),
    [
        (NaturalPartition("writer"), [1, 2, 3], 2, "'writer', got 2: set num_clients to 3"),
        (LabelShards(classes_per_client=3), [0, 1] * 5, 4, "number of classes, 2, got 3"),
        (LabelShards(classes_per_client=1), [0, 1, 2] * 5, 2, "class would have no client"),
        (LabelShards(classes_per_client=2), [0] * 8 + [1] * 3, 4, "at most 1 for 4 clients, got 2"),
        (McMahanShards(shards_per_client=3), range(10), 4, "shards_per_client must be at most"),
        (DirichletPerClass(alpha=1e-3), DIGITS, 20, WAY_OUT),
        (DirichletPerClass(alpha=1.0, min_examples=91), DIGITS, 20, "at most 89 .* got 91"),
        (DirichletSizes(alpha=1.0, min_examples=4), [0] * 10, 3, "must be at most 3"),
        (PowerLawSizes(exponent=1.0, min_examples=4), [0] * 10, 3, "must be at most 3"),
        (IID(), np.zeros((4, 2)), 2, r"labels must have shape \(N,\)"),
    ],
)
def test_the_impossible_is_refused(rule, labels, num_clients, message):
    with pytest.raises(ConfigurationError, match=message):
        rule.assign(np.array(labels), num_clients, 0)
