"""Two halves of every client's examples: disjoint, whole, and each example with a partner."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ConfigurationError, FederatedDataModule
from fl_lightning.data.client_examples import LabelFlip
from fl_lightning.data.roles import partners
from fl_lightning.data.shards import FlatShards


class Numbered(LightningDataModule):
    """Twelve examples; twice its number is an example's first input."""

    def train_dataloader(self):
        data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2)
        return DataLoader(data, batch_size=2, shuffle=True)


def federated(num_clients=3, **options):
    data = FederatedDataModule(Numbered(), num_clients=num_clients, seed=0, **options)
    data.setup("fit")
    return data


def pairs_in(batch):
    halves = (batch[half][0][:, 0].tolist() for half in ("train", "search"))
    return dict(zip(*halves, strict=True))


def test_without_a_search_shards_and_batches_stay():
    plain, off = federated(), federated(search_fraction=0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain.clients, off.clients, strict=True))
    batch = off.train_batch(off.clients[0])
    assert torch.equal(batch[0], plain.train_batch(plain.clients[0])[0])


# four clients have three examples each
@pytest.mark.parametrize(("fraction", "num_clients"), [(0.25, 3), (0.5, 3), (0.5, 4)])
def test_halves_are_disjoint_and_cover_what_the_client_trains_on(fraction, num_clients):
    data = federated(num_clients, search_fraction=fraction)
    plain = federated(num_clients)
    for client in range(num_clients):
        mine = data.clients[client]
        batch = data.train_batch(mine)
        others = set(batch["search"][0][:, 0].div(2).long().tolist())
        own = set(mine.tolist())
        assert not own & others
        assert own | others == set(plain.clients[client].tolist())
        assert len(batch["search"][1]) == len(batch["train"][1]) == len(mine)


def test_attackers_poison_the_same_examples_as_without_a_search():
    data, plain = federated(search_fraction=0.25), federated()
    found = []
    for module in (data, plain):
        module.poison([0, 2], LabelFlip(2, share=0.5), seed=0)
        batch = module.train_batch(module.train_indices)
        halves = batch.values() if module is data else [batch]
        inputs, labels = (torch.cat(parts) for parts in zip(*halves, strict=True))
        numbers = inputs[:, 0].div(2).long()
        found.append(set(numbers[labels != numbers % 2].tolist()))
    assert found[0] == found[1]
    assert len(found[0]) == 4


@example(sizes=[3, 7], fraction=0.5)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.floats(0.05, 0.5))
def test_every_example_of_the_second_half_is_somebodys_partner(sizes, fraction):
    ends = np.cumsum(sizes)
    shards = FlatShards.of(
        [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    )
    training, search = shards.hold_out(fraction, np.random.default_rng(0), at_most_half=True)
    assert (search.num_examples <= training.num_examples).all()
    partner = partners(training, search)
    for mine, others in zip(training, search, strict=True):
        assert set(partner[mine].tolist()) == set(others.tolist())


def test_a_central_run_sees_the_same_pairs():
    data = federated(search_fraction=0.5)
    pairs, found = {}, {}
    for client in range(3):
        pairs |= pairs_in(data.train_batch(data.clients[client]))
    for batch in data.train_dataloader():
        assert len(batch["train"][1]) == 2
        found |= pairs_in(batch)
    assert found == pairs


def test_what_has_no_halves_is_refused():
    with pytest.raises(ConfigurationError, match="client 0 has one example"):
        _ = federated(num_clients=12, search_fraction=0.5).train_batch
    shards = FlatShards.of([np.array([0, 1]), np.array([1, 2])])
    with pytest.raises(ConfigurationError, match="do not overlap"):
        partners(shards, FlatShards.of([np.array([3]), np.array([4])]))
    for fraction in (-0.1, 0.6):
        with pytest.raises(ConfigurationError, match="search_fraction must be 0 or in"):
            federated(search_fraction=fraction)
