"""What clients do to their own examples: each its own, always the same, and nobody else's."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from toys import ToyData, ToyModule, toy_trainer, weights

from fl_lightning import ConfigurationError, FederatedDataModule, Federation
from fl_lightning.data import (
    Digits,
    FederatedNormalize,
    LabelFlip,
    LabelPermutation,
    NaturalPartition,
    Partition,
    QuarterTurns,
    Trigger,
)


class Marked:
    """Puts the client's number in the place of an input, and a draw of the seed beside it."""

    def apply(self, inputs, labels, client, seeds):
        draws = [int(np.random.default_rng(seed).integers(1000)) for seed in seeds]
        return torch.full_like(inputs, client), 1000 * labels + torch.tensor(draws)


class Sentences(LightningDataModule):
    def train_dataloader(self):
        words = TensorDataset(torch.arange(12), torch.arange(12) % 2)
        return DataLoader(words, 4, collate_fn=lambda rows: f"{len(rows)} words")


class Overlapping(Partition):
    uses_labels = False

    def assign(self, labels, num_clients, seed):
        return [np.arange(6), np.arange(5, 9)]


def wrapped(source, *transforms, num_clients=5, **options):
    data = FederatedDataModule(
        source, num_clients=num_clients, seed=0, example_transforms=list(transforms), **options
    )
    data.setup("fit")
    return data


@pytest.mark.parametrize("source", [ToyData(), Digits(seed=0)], ids=["by example", "by batch"])
def test_each_client_changes_its_own_and_always_in_the_same_way(source):
    data = wrapped(source, Marked(), client_val_fraction=0.2, client_test_fraction=0.2)
    plain = wrapped(source, client_val_fraction=0.2, client_test_fraction=0.2)
    for client, shard in enumerate(data.clients):
        batch = data.train_batch(shard)
        assert type(batch) is type(plain.train_batch(shard))
        inputs, labels = batch
        assert (inputs == client).all()
        assert torch.equal(labels // 1000, plain.train_batch(shard)[1])
        assert torch.equal(labels, data.train_batch(shard)[1])
        assert torch.equal(labels.flip(0), data.train_batch(shard.flip(0))[1])
        for stage in ("validation", "test"):
            assert all(
                (held[0] == client).all() for held, _ in data.held_out_batches(client, stage)
            )
    mixed = torch.cat([data.clients[0][:1], data.clients[3][:1]])  # as slots read
    assert data.train_batch(mixed)[0].flatten(1)[:, 0].tolist() == [0, 3]
    assert not data.reads_by_index


def test_several_run_in_order_and_before_what_is_learnt_of_all():
    data = wrapped(Digits(seed=0), Marked(), transforms=[FederatedNormalize(eps=0.0)])
    counts = data.clients.num_examples
    mean = (np.arange(5) * counts).sum() / counts.sum()
    std = np.sqrt((np.arange(5) ** 2 * counts).sum() / counts.sum() - mean**2)
    inputs = data.train_batch(data.clients[4])[0]
    torch.testing.assert_close(inputs[0, 0, 0, 0].item(), (4 - mean) / std, rtol=1e-5, atol=0)


def test_switched_off_they_vanish():
    batches = []
    for transforms in ([], [QuarterTurns(1), LabelPermutation(10, 1)]):
        data = wrapped(Digits(seed=0), *transforms)
        batches.append([data.train_batch(shard) for shard in data.clients])
    for one, other in zip(*batches, strict=True):
        assert all(map(torch.equal, one, other))


def test_quarter_turns_turn_by_client():
    turned, plain = wrapped(Digits(seed=0), QuarterTurns()), wrapped(Digits(seed=0))
    for client, shard in enumerate(plain.clients):
        expected = torch.rot90(plain.train_batch(shard)[0], client, (2, 3))
        assert torch.equal(turned.train_batch(shard)[0], expected)


def test_labels_are_permuted_in_groups():
    change = LabelPermutation(10, num_groups=3, seed=1)
    labels = torch.arange(10)
    maps = [change.apply(labels, labels, client, range(10))[1].tolist() for client in range(6)]
    assert maps[0] == list(range(10))
    assert all(sorted(renamed) == list(range(10)) for renamed in maps)
    assert maps[:3] == maps[3:]
    assert maps[1] != maps[2]


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_training_is_training_on_a_data_set_that_holds_them(engine):
    """A source whose stored examples are already changed gives the same weights, bit for bit."""

    class Changed(ToyData):
        def setup(self, stage):
            super().setup(stage)
            plain = FederatedDataModule(ToyData(), num_clients=5, seed=0)
            plain.setup("fit")
            for client, shard in enumerate(plain.clients):
                self.train.tensors[0][shard] *= 1 + client

    class Louder:
        def apply(self, inputs, labels, client, seeds):
            return inputs * (1 + client), labels

    trained = []
    for data in (wrapped(Changed()), wrapped(ToyData(), Louder())):
        seed_everything(0, verbose=False)
        module = ToyModule()
        federation = Federation(local_steps=3, seed=0, engine=engine)
        toy_trainer(federation, max_epochs=2).fit(module, datamodule=data)
        trained.append(weights(module))
    torch.testing.assert_close(*trained, rtol=1e-6, atol=1e-7)
    if engine == "sequential":
        assert torch.equal(*trained)


def test_a_central_run_pools_what_clients_train_on():
    data = wrapped(ToyData(batch_size=8), Marked(), client_val_fraction=0.2)
    inputs = torch.cat([batch[0] for batch in data.train_dataloader()])
    assert torch.bincount(inputs[:, 0].long()).tolist() == data.clients.num_examples.tolist()
    assert data.train_indices.tolist() == data.clients.indices.tolist()  # a mask's, too


def test_wrong_examples_and_options_are_refused():
    with pytest.raises(ConfigurationError, match="belongs to two clients"):
        wrapped(
            ToyData(num_examples=9), Marked(), num_clients=2, partition=Overlapping()
        ).train_batch(torch.tensor([0]))
    with pytest.raises(ConfigurationError, match="from 1 to 4, got 5"):
        QuarterTurns(5)
    with pytest.raises(ConfigurationError, match="num_classes must be at least 2"):
        LabelPermutation(1)
    with pytest.raises(ConfigurationError, match="num_classes 2 and a label 2"):
        LabelPermutation(2).apply(torch.zeros(1), torch.tensor([2]), 0, [0])
    for wrong in (torch.tensor([-1]), torch.tensor([10])):
        with pytest.raises(ConfigurationError, match=f"num_classes 10 and a label {int(wrong)}"):
            LabelFlip(10).change(torch.zeros(1), wrong)
    one_hot = torch.eye(10)
    for change in (
        lambda: LabelPermutation(10).apply(one_hot, one_hot, 0, range(10)),
        lambda: LabelFlip(10).change(one_hot, one_hot),
        lambda: Trigger(target=0).change(torch.zeros(10, 1, 8, 8), one_hot),
    ):
        with pytest.raises(
            ConfigurationError, match=r"changes class numbers, got rows of shape \(10,\)"
        ):
            change()
    with pytest.raises(ConfigurationError, match="as high as they are wide"):
        wrapped(ToyData(), QuarterTurns()).train_batch(torch.tensor([0]))


def test_batches_that_are_no_pairs_are_refused():
    data = wrapped(Sentences(), Marked(), num_clients=2)
    with pytest.raises(
        ConfigurationError, match=r"inputs and labels, got str: let the data set return pairs"
    ):
        data.train_batch(data.clients[0])


def test_owners_by_an_attribute_are_the_clients_that_change():
    source = ToyData(num_examples=6)
    partition = NaturalPartition([5, 3, 5, 3, 4, 4])
    data = wrapped(source, Marked(), num_clients=3, partition=partition)
    assert data.train_batch(torch.arange(6))[0][:, 0].tolist() == [2, 0, 2, 0, 1, 1]
