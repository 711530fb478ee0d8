"""Shards in one array: the same as a list of arrays, and a million clients cost numbers only."""

import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyData, toy_data

from fl_lightning import partition_figure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data import shards as shards_file
from fl_lightning.data.cohorts.cohort import UniformCohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.partition import IID
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.summary import PartitionSummary

LISTS = st.lists(
    st.lists(st.integers(0, 50), max_size=9).map(lambda s: np.array(s, dtype=np.int64)),
    max_size=9,
)


class Windows:
    """Twenty neighbouring examples for everybody: shards overlap."""

    uses_labels = False

    def __init__(self, size=20):
        self.size = size

    def assign(self, labels, num_clients, seed):
        first = np.arange(num_clients) % (len(labels) - self.size)
        indices = first[:, None] + np.arange(self.size)
        return FlatShards(indices.ravel(), np.full(num_clients, self.size))


class TestIsLikeAList:
    @given(shards=LISTS)
    def test_of_arrays(self, shards):
        flat = FlatShards.of(shards)
        assert len(flat) == len(shards)
        for found in (list(flat), flat[:], [flat[i] for i in range(len(shards))]):
            assert [one.tolist() for one in found] == [one.tolist() for one in shards]
        assert all(one.dtype == torch.int64 for one in flat)
        assert flat.num_examples.tolist() == [len(one) for one in shards]
        assert FlatShards.of(flat) is flat

    def test_of_whole_numbers_alone(self):
        assert FlatShards.of([np.array([2, 1]), []])[0].tolist() == [2, 1]
        for wrong in ([True, False], [0.5], ["a"]):
            with pytest.raises(
                ConfigurationError, match="must be indices of examples, whole numbers"
            ):
                FlatShards.of([np.array(wrong)])

    @given(shards=LISTS, picks=st.lists(st.integers(0, 8), max_size=9))
    def test_of_which_several_are_taken(self, shards, picks):
        clients = [pick for pick in picks if pick < len(shards)]
        expected = [shards[client].tolist() for client in clients]
        indices, sizes = FlatShards.of(shards).take(clients)
        assert indices.tolist() == [index for one in expected for index in one]
        assert indices.dtype == torch.int64
        assert sizes.tolist() == [len(one) for one in expected]

    def test_at_both_ends(self):
        flat = FlatShards(np.array([4, 0, 2]), np.array([2, 1]))
        assert flat[-1].tolist() == [2]
        assert [one.tolist() for one in flat[1:]] == [[2]]
        assert flat.take([-1, -2])[0].tolist() == [2, 4, 0]
        with pytest.raises(IndexError):
            flat[2]
        with pytest.raises(IndexError):
            flat.take([2])

    def test_indices_take_four_bytes_where_they_fit(self):
        sizes = np.array([1])
        assert FlatShards(np.array([2**31 - 1]), sizes).indices.dtype == np.int32
        large = FlatShards(np.array([2**31]), sizes)
        assert large.indices.dtype == np.int64
        assert large[0].tolist() == [2**31]


class TestRefuses:
    @pytest.mark.parametrize("sizes", [[1], [3], [3, -1], []])
    def test_sizes_that_do_not_fit(self, sizes):
        with pytest.raises(ConfigurationError, match="sum to the number of indices, 2, got"):
            FlatShards(np.array([0, 1]), np.array(sizes, dtype=np.int64))

    def test_negative_indices(self):
        with pytest.raises(ConfigurationError, match="indices must be at least 0, got -1"):
            FlatShards(np.array([0, -1]), np.array([2]))

    def test_examples_that_do_not_exist(self):
        class Beyond:
            def assign(self, labels, num_clients, seed):
                return [np.array([0]), np.array([len(labels)])]

        with pytest.raises(ConfigurationError, match=r"Beyond\.assign .* examples, 60, got 60"):
            _ = toy_data(2, partition=Beyond()).clients


def hold_out_by_the_book(shards, fraction, generator):
    """Sort all examples by owner and draw, give each client's first ones away."""
    sizes = [len(shard) for shard in shards]
    owners = np.repeat(np.arange(len(shards)), sizes)
    order = np.lexsort((generator.random(len(owners)), owners))
    parts = np.split(np.concatenate(shards)[order], np.cumsum(sizes)[:-1])
    counts = [
        int(np.clip(max(np.rint(fraction * n), 1), 0, max(n - 1, 0))) if fraction else 0
        for n in sizes
    ]
    pairs = list(zip(parts, counts, strict=True))
    return [p[n:].tolist() for p, n in pairs], [p[:n].tolist() for p, n in pairs]


@given(
    shards=LISTS.filter(len),
    fraction=st.floats(0, 1, exclude_max=True),
    block=st.sampled_from([1, 3, 7, 1000]),
)
def test_hold_out_block_by_block_is_that_of_all_at_once(shards, fraction, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_file, "BLOCK", block)
        found = FlatShards.of(shards).hold_out(fraction, np.random.default_rng(7))
    expected = hold_out_by_the_book(shards, fraction, np.random.default_rng(7))
    assert tuple([one.tolist() for one in part] for part in found) == expected


class TestOverlappingShards:
    def test_are_held_out_client_by_client(self):
        data = toy_data(50, partition=Windows(), client_val_fraction=0.25)
        for client, (kept, held) in enumerate(
            zip(data.clients, data.held_out("validation"), strict=True)
        ):
            assert (len(kept), len(held)) == (15, 5)
            window = range(client % 40, client % 40 + 20)
            assert sorted(torch.cat([kept, held]).tolist()) == list(window)
        assert toy_data(50, partition=Windows()).summary().counts.sum() == 50 * 20


def test_summary_of_many_clients_counts_some_and_says_so():
    labels = np.arange(60) % 3
    shards = IID().assign(labels, 20, 0)
    whole, some = (
        PartitionSummary.of(shards, labels),
        PartitionSummary.of(shards, labels, max_clients=5),
    )
    assert some.clients.tolist() == [0, 4, 8, 12, 16]
    np.testing.assert_array_equal(some.counts, whole.counts[some.clients])
    np.testing.assert_array_equal(some.sizes, whole.sizes)
    assert some.fingerprint == whole.fingerprint
    assert "(classes and entropy of 5 clients, evenly spaced)" in some.as_text()
    figure = partition_figure(some.table())
    ticks = figure.axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["0", "4", "8", "12", "16"]
    assert "5 clients, evenly spaced by number, have 3 examples" in figure.get_suptitle()


class TestManyClients:
    """A hundred thousand of twenty examples: with an object for each these would not pass."""

    NUM_CLIENTS = 100_000

    def set_up(self):
        data = FederatedDataModule(
            ToyData(num_examples=6000),
            num_clients=self.NUM_CLIENTS,
            partition=Windows(),
            client_val_fraction=0.1,
            seed=0,
        )
        assert len(data.fingerprint) == 32
        assert data.summary().sizes.sum() == 18 * self.NUM_CLIENTS
        return data

    def test_make_no_objects_and_take_no_time(self):
        self.set_up()  # what is imported and cached once
        blocks, start = sys.getallocatedblocks(), time.process_time()
        data = self.set_up()
        assert time.process_time() - start < 5
        assert sys.getallocatedblocks() - blocks < 20_000
        assert len(data.clients) == self.NUM_CLIENTS

    def test_need_little_more_than_their_numbers(self):
        tracemalloc.start()
        try:
            data = self.set_up()
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        numbers = sum(
            array.nbytes
            for part in (data.clients, data.held_out("validation"))
            for array in (part.indices, part.num_examples, part.starts)
        )
        assert kept < numbers + 5e6
        assert peak < 4 * numbers  # of which two are the partition's own int64 indices

    def test_a_cohort_costs_a_cohort(self):
        population = Population(np.full(5_000_000, 20))
        UniformCohort(size=1000).sample(0, population, 0)
        tracemalloc.start()
        try:
            ids = UniformCohort(size=1000).sample(1, population, 0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(set(ids.tolist())) == 1000
        assert peak < 1e6  # a permutation of the clients takes forty times that
