"""The summary of a partition: counts by hand, entropy's limits, the hash, the table, the picture."""

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fl_lightning import partition_figure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClient
from fl_lightning.data.partitions.partition import IID, PowerLawSizes
from fl_lightning.data.summary import PartitionSummary, partition_fingerprint

LABELS = np.array([5, 5, 9, -1, 9, 5])
SHARDS = [np.array([0, 1]), np.array([2, 3, 4, 5])]


@pytest.fixture
def summary():
    return PartitionSummary.of(SHARDS, LABELS)


def test_counts_by_hand(summary):
    assert summary.classes.tolist() == [-1, 5, 9]
    assert summary.counts.tolist() == [[0, 2, 0], [1, 1, 2]]
    assert summary.sizes.tolist() == [2, 4]
    assert summary.classes_per_client.tolist() == [1, 3]
    np.testing.assert_allclose(summary.label_entropy, [0.0, 1.5])


def test_counts_agree_with_a_plain_loop():
    labels = load_digits().target
    shards = DirichletPerClient(alpha=0.3).assign(labels, 13, 0)
    plain = [np.bincount(labels[shard], minlength=10) for shard in shards]
    np.testing.assert_array_equal(PartitionSummary.of(shards, labels).counts, plain)


def test_an_empty_client_has_no_entropy_and_no_clients_are_refused():
    found = PartitionSummary.of([np.array([], dtype=int), np.array([0, 1])], np.array([0, 1]))
    assert found.label_entropy.tolist() == [0.0, 1.0]
    with pytest.raises(ConfigurationError, match="at least one client"):
        PartitionSummary.of([], LABELS)


@given(st.permutations(range(6)), st.integers(0, 6))
def test_any_other_partition_has_another_fingerprint(order, cut):
    shards = [np.array(order[:cut], dtype=np.int64), np.array(order[cut:], dtype=np.int64)]
    same = [shard.tolist() for shard in shards] == [shard.tolist() for shard in SHARDS]
    assert (partition_fingerprint(shards) == partition_fingerprint(SHARDS)) == same


def test_text(summary):
    lines = summary.as_text().splitlines()
    assert lines[0] == "2 clients, 6 examples, 3 classes"
    found = [" ".join(line.split()) for line in lines[1:4]]
    assert found == [
        "examples per client min 2, median 3, max 4",
        "classes per client min 1, median 2, max 3",
        "label entropy (bits) min 0.00, median 0.75, max 1.50",
    ]
    assert lines[4].endswith(summary.fingerprint)


def test_table_reads_back(summary, tmp_path):
    path = tmp_path / "run" / "partition.csv"
    summary.save(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("client", "num_examples", "num_classes", "label_entropy_bits"),
        *("class_-1", "class_5", "class_9"),
    ]
    assert list(rows[1].values()) == ["1", "4", "3", "1.500000", "1", "1", "2"]


class TestFigure:
    def test_shows_every_count_and_size(self, tmp_path):
        labels = load_digits().target
        shards = PowerLawSizes(exponent=1.0).assign(labels, 20, 0)
        found = PartitionSummary.of(shards, labels)
        figure = partition_figure(found.table())
        grid, sizes = figure.axes[:2]
        np.testing.assert_array_equal(grid.images[0].get_array(), found.counts)
        assert sorted(sizes.lines[0].get_xdata()) == sorted(found.sizes.tolist())
        assert (grid.get_xlabel(), grid.get_ylabel()) == ("class", "client")
        assert [tick.get_text() for tick in grid.get_xticklabels()] == [str(c) for c in range(10)]
        assert "20 clients have" in figure.get_suptitle()
        assert "shows" not in figure.get_suptitle()
        figure.savefig(tmp_path / "partition.png")

    def test_samples_many_clients_and_says_so(self):
        labels = np.repeat(np.arange(10), 100)
        table = PartitionSummary.of(IID().assign(labels, 1000, 0), labels).table()
        figure = partition_figure(table)
        grid = figure.axes[0]
        assert grid.images[0].get_array().shape == (200, 10)
        assert "The map shows 200 of 1,000 clients, evenly spaced." in figure.get_suptitle()
        assert [tick.get_text() for tick in grid.get_yticklabels()][:2] == ["0", "100"]
