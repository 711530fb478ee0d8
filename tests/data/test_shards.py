"""The order of a client's examples: epochs are permutations, cut into batches."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.data.shards import local_order


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
