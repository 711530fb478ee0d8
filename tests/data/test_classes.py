"""What labels mean: one-hot rows, strings, binary targets, real numbers and their bins."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData

from fl_lightning import partition_figure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import are_classes, as_labels, quantile_bins
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClass, DirichletPerClient
from fl_lightning.data.partitions.label_shards import LabelShards, McMahanShards
from fl_lightning.data.partitions.partition import IID

CLASSES = np.arange(24) % 3
NAMES = np.array(["ant", "bee", "cat"])[CLASSES]
ONE_CLASS = LabelShards(classes_per_client=1)
BY_CLASS = pytest.mark.parametrize(
    "rule",
    [ONE_CLASS, DirichletPerClass(alpha=0.5), DirichletPerClient(alpha=0.5)],
    ids=lambda rule: type(rule).__name__,
)
AGES = torch.linspace(25, 60, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]


def federated(labels, partition=None, **options):
    dataset = TensorDataset(torch.zeros(24, 1), torch.arange(24))
    options = {"num_clients": 3, "seed": 0, "labels": labels} | options
    return FederatedDataModule(LoaderData(DataLoader(dataset)), partition=partition, **options)


def owned(data):
    return [shard.tolist() for shard in data.clients]


@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        *((np.eye(3, dtype=t)[CLASSES], CLASSES.tolist(), None) for t in ("f4", "i8", "?", "u1")),
        (np.array([[0.0], [1.0], [1.0]], np.float32), [0, 1, 1], None),  # binary targets of a loss
        (np.array([0.0, 1.0]), [0, 1], True),
        # others stay as they are
        (np.array([3, 1]), None, True),
        (np.array(["b", "a"]), None, True),
        (np.array([True, False]), None, True),
        (np.array([25.0, 31.0]), None, False),
        (np.array([0.0, np.nan]), None, False),
        (np.array([[1, 1, 0], [0, 0, 1]]), None, False),  # several classes at once
        (np.array([[0, 0], [1, 0]]), None, False),  # or none
        (np.array([[0.5, 0.5], [0.1, 0.9]]), None, False),
    ],
    ids=str,
)
def test_what_labels_and_classes_are(values, labels, classes):
    found = as_labels(values)
    assert (
        found is values if labels is None else (found.tolist(), found.dtype.kind) == (labels, "i")
    )
    assert classes is None or are_classes(values) is classes


@BY_CLASS
class TestPartitionsByClass:
    def test_divide_by_what_the_labels_mean(self, rule):
        expected = owned(federated(CLASSES, rule))
        for labels in (
            NAMES,
            np.eye(3)[CLASSES],
            torch.eye(3, dtype=torch.int64)[CLASSES],
            CLASSES.astype(np.uint8),
            np.array([-7, 0, 100])[CLASSES],
        ):
            assert owned(federated(labels, rule)) == expected
        two = CLASSES % 2
        targets = two[:, None].astype(np.float32)
        one, other = (owned(federated(given, rule, num_clients=2)) for given in (targets, two))
        assert one == other

    def test_refuse_what_is_no_class_and_offer_bins(self, rule):
        message = rf"{type(rule).__name__} divides by class, and the labels are \d+ different real numbers from 25 to 60: set data.bins"
        for numbers in (AGES, AGES.round(), AGES[:, None]):
            with pytest.raises(ConfigurationError, match=message):
                owned(federated(numbers, rule))
        with pytest.raises(ConfigurationError, match=r"got rows of 4 numbers .*set data\.labels"):
            owned(federated(np.ones((24, 4)), rule))  # several classes at once

    def test_divide_real_numbers_by_bins(self, rule):
        thirds = torch.bucketize(
            AGES, AGES.sort().values[[8, 16]], right=True
        )  # by hand: eight each
        assert thirds.bincount().tolist() == [8, 8, 8]
        assert owned(federated(AGES, rule, bins=3)) == owned(federated(thirds, rule))


class TestBins:
    def test_change_the_shards_and_the_report(self):
        two, three = (federated(AGES, ONE_CLASS, bins=bins) for bins in (2, 3))
        assert two.fingerprint != three.fingerprint
        assert [len(data.summary().classes) for data in (two, three)] == [2, 3]
        assert three.summary().classes_per_client.tolist() == [1, 1, 1]

    def test_sort_by_them_where_a_rule_asks_for_no_classes(self):
        shards = McMahanShards(shards_per_client=1).assign(AGES.numpy(), 3, 0)
        ranges = sorted((AGES[shard].min().item(), AGES[shard].max().item()) for shard in shards)
        assert all(below[1] < above[0] for below, above in itertools.pairwise(ranges))

    @given(
        numbers=st.lists(st.integers(-50, 50), min_size=1, max_size=60),
        bins=st.integers(2, 12),
    )
    def test_follow_the_order_and_are_equally_full_but_for_ties(self, numbers, bins):
        values = np.array(numbers)
        found = quantile_bins(values, bins)
        assert found.min() >= 0
        assert found.max() < bins
        order = np.argsort(values, kind="stable")
        assert (np.diff(found[order]) >= 0).all()
        distinct = len(np.unique(values)) == len(values)
        sizes = np.bincount(found, minlength=bins)
        if distinct:
            assert sizes.max() - sizes.min() <= 2
        for value in np.unique(values):
            assert len(set(found[values == value])) == 1

    def test_refuse_what_is_not_one_number_each(self):
        for labels in (["a"] * 24, np.eye(3)[CLASSES] * 2, np.array([np.nan, *range(23)])):
            with pytest.raises(ConfigurationError, match=r"data\.bins needs one finite number p"):
                owned(federated(labels, ONE_CLASS, bins=3))


def test_a_report_of_real_numbers_counts_no_classes_and_one_of_strings_does(tmp_path):
    summary = federated(AGES, IID()).summary()
    lines = [" ".join(line.split()) for line in summary.as_text().splitlines()]
    assert lines[0] == "3 clients, 24 examples, no classes"
    assert lines[1] == "examples per client min 8, median 8, max 8"
    assert lines[2].startswith("fingerprint")
    summary.save(tmp_path / "partition.csv")
    rows = (tmp_path / "partition.csv").read_text().splitlines()
    assert rows[:2] == ["client,num_examples,num_classes,label_entropy_bits", "0,8,0,0.000000"]
    grid = partition_figure(summary.table()).axes[0]
    assert grid.images[0].get_array().tolist() == [[8], [8], [8]]
    summary = federated(NAMES, ONE_CLASS).summary()
    assert summary.classes.tolist() == ["ant", "bee", "cat"]
    assert sorted(summary.counts.tolist()) == [[0, 0, 8], [0, 8, 0], [8, 0, 0]]
