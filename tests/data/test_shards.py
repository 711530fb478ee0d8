"""From indices to batches: epochs are permutations, batches the data set's own examples."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fl_lightning.data.shards import local_order
from fl_lightning.data.training_set import batch_reader

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12) % 5


class Pairs(Dataset):
    """Examples one by one, (x, y), without an attribute that holds the labels."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Whole(Pairs):
    """The same, and whole batches at once."""

    def gather(self, indices):
        return X[indices], Y[indices]


def drawn(num_examples, batch_size, *, seed=0, **options):
    shard = torch.arange(100, 100 + num_examples)
    generator = torch.Generator().manual_seed(seed)
    order, sizes = local_order(shard, batch_size, lambda: generator, **options)
    return [batch.tolist() for batch in order.split(sizes)]


class TestLocalOrder:
    @given(
        num_examples=st.integers(1, 40),
        batch_size=st.integers(1, 50),
        num_epochs=st.integers(1, 4),
        seed=st.integers(0, 99),
    )
    def test_every_epoch_is_a_permutation(self, num_examples, batch_size, num_epochs, seed):
        found = drawn(num_examples, batch_size, seed=seed, num_epochs=num_epochs)
        per_epoch = math.ceil(num_examples / batch_size)
        assert len(found) == per_epoch * num_epochs
        for epoch in range(num_epochs):
            batches = found[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(itertools.chain(*batches)) == list(range(100, 100 + num_examples))
            assert all(len(batch) == batch_size for batch in batches[:-1])

    @given(
        num_examples=st.integers(1, 40),
        batch_size=st.integers(1, 50),
        num_batches=st.integers(0, 30),
        drop_last=st.booleans(),
    )
    def test_a_number_of_batches_wraps_around(
        self, num_examples, batch_size, num_batches, drop_last
    ):
        options = {"drop_last": drop_last, "seed": 1}
        found = drawn(num_examples, batch_size, num_batches=num_batches, **options)
        assert len(found) == num_batches
        epochs = drawn(num_examples, batch_size, num_epochs=30, **options)
        assert found == epochs[:num_batches]

    @given(num_examples=st.integers(1, 40), batch_size=st.integers(1, 50))
    def test_drop_last_leaves_full_batches_or_the_only_one(self, num_examples, batch_size):
        found = drawn(num_examples, batch_size, num_epochs=2, drop_last=True)
        if num_examples < batch_size:
            assert [len(batch) for batch in found] == [num_examples] * 2
        else:
            assert [len(batch) for batch in found] == [batch_size] * (
                num_examples // batch_size * 2
            )

    def test_epochs_and_generators_differ(self):
        first, _, second, _ = drawn(30, 29, num_epochs=2)
        assert first != second
        assert drawn(30, 29, num_epochs=1) != drawn(30, 29, num_epochs=1, seed=1)

    def test_one_batch_has_no_order(self):
        assert drawn(3, 3, num_epochs=2) == [[100, 101, 102]] * 2
        assert drawn(3, 7, num_batches=3, drop_last=True) == [[100, 101, 102]] * 3


class TestGather:
    @pytest.mark.parametrize(
        "dataset",
        [
            TensorDataset(X, Y),
            Pairs(),
            Whole(),
            [(x, int(y)) for x, y in zip(X, Y, strict=True)],
            ConcatDataset([TensorDataset(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])]),
        ],
        ids=["tensors", "one by one", "whole batches", "list", "concatenated"],
    )
    @pytest.mark.parametrize(
        "indices_of_subset",
        [None, [7, 3, 11, 0], torch.tensor([7, 3, 11, 0]), np.array([7, 3, 11, 0]), range(2, 8)],
        ids=["all", "list", "tensor", "array", "range"],
    )
    def test_equals_a_loaders_batch(self, dataset, indices_of_subset):
        if indices_of_subset is not None:
            dataset = Subset(dataset, indices_of_subset)
        indices = torch.tensor([2, 0, 3, 2])
        found = batch_reader(dataset)(indices)
        loader = DataLoader(dataset, batch_sampler=[indices.tolist()])
        for one, other in zip(found, next(iter(loader)), strict=True):
            assert torch.equal(one, other)

    def test_a_subclass_of_a_tensor_data_set_keeps_its_own_examples(self):
        class Negated(TensorDataset):
            def __getitem__(self, index):
                x, y = super().__getitem__(index)
                return -x, y

        x, _ = batch_reader(Negated(X, Y))(torch.tensor([1]))
        assert torch.equal(x, -X[[1]])
