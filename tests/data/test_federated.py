"""A data module around another: whose examples are whose, and what is handed through."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)
from toys import LoaderData, ToyData, toy_data

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.label_shards import LabelShards
from fl_lightning.data.partitions.partition import IID, NaturalPartition
from fl_lightning.data.sources.known_sets import Digits


class Letters(TensorDataset):
    """Twelve examples by three writers."""

    def __init__(self):
        super().__init__(torch.arange(12.0), torch.arange(12) % 4)
        self.writer = ["bo", "al", "cy", "al"] * 3


def owned(data):
    return [sorted(shard.tolist()) for shard in data.clients]


def federated(loader, **options):
    return FederatedDataModule(LoaderData(loader), **{"num_clients": 3, "seed": 0, **options})


class TestShards:
    @pytest.mark.parametrize("partition", [None, IID(), LabelShards(classes_per_client=2)])
    def test_are_a_cover_of_the_sources_training_set(self, partition):
        data = FederatedDataModule(ToyData(), num_clients=7, partition=partition, seed=0)
        assert len(data.clients) == 7
        assert sorted(torch.cat(list(data.clients)).tolist()) == list(range(60))

    def test_labels_are_found(self):
        data = FederatedDataModule(
            ToyData(), num_clients=6, partition=LabelShards(classes_per_client=1), seed=0
        )
        assert data.labels.tolist() == [i % 3 for i in range(60)]
        assert data.summary().classes_per_client.tolist() == [1] * 6

    def test_natural_owners_need_no_number(self):
        partition = NaturalPartition(attribute="writer")
        data = federated(DataLoader(Letters()), num_clients=None, partition=partition)
        assert owned(data) == [[1, 3, 5, 7, 9, 11], [0, 4, 8], [2, 6, 10]]
        assert data.labels.tolist() == [0, 1, 2, 3] * 3

    def test_a_rule_that_derives_from_nothing_says_what_it_looks_at(self):
        class ByOwner:
            attribute = "writer"

            def assign(self, labels, num_clients, seed):
                return [np.flatnonzero(labels == value) for value in np.unique(labels)]

        class Unseen:
            uses_labels = False

            def assign(self, labels, num_clients, seed):
                assert not labels.any()
                return np.array_split(np.arange(len(labels)), num_clients)

        letters = DataLoader(Letters())
        natural = federated(letters, num_clients=None, partition=NaturalPartition("writer"))
        assert owned(federated(letters, num_clients=None, partition=ByOwner())) == owned(natural)
        assert owned(federated(letters, num_clients=2, partition=Unseen())) == [
            [*range(6)],
            [*range(6, 12)],
        ]

    def test_held_out_examples_are_never_trained_on(self):
        plain, data = toy_data(), toy_data(client_val_fraction=0.25)
        for whole, train, held in zip(
            plain.clients, data.clients, data.held_out("validation"), strict=True
        ):
            assert set(train.tolist()) | set(held.tolist()) == set(whole.tolist())
            assert not set(train.tolist()) & set(held.tolist())
            assert len(held) == max(1, round(0.25 * len(whole)))
        assert [len(held) for held in plain.held_out("validation")] == [0] * 6

    def test_examples_that_are_drawn_twice_are_not_held_out(self):
        loader = DataLoader(range(4), batch_size=2, sampler=SubsetRandomSampler([0, 0, 1, 2, 3]))
        options = {"num_clients": 1, "labels": [0, 1, 0, 1]}
        assert len(federated(loader, **options).clients[0]) == 5
        with pytest.raises(
            ConfigurationError, match="5 draws of 4 examples: a client would train on its"
        ):
            _ = federated(loader, client_val_fraction=0.2, seed=1, **options).clients


class TestFingerprint:
    @pytest.mark.parametrize(
        "options", [{"seed": 1}, {"client_val_fraction": 0.1}, {"partition": IID()}]
    )
    def test_changes_with_what_clients_train_on(self, options):
        assert toy_data(**options).fingerprint != toy_data().fingerprint

    def test_the_held_out_choice_depends_on_the_seed(self):
        partition = NaturalPartition(attribute="writer")
        options = {"partition": partition, "client_val_fraction": 0.5}
        held = []
        for seed in (0, 0, 1):
            data = federated(DataLoader(Letters()), seed=seed, **options)
            held.append([sorted(shard.tolist()) for shard in data.held_out("validation")])
        assert held[0] == held[1] != held[2]

    def test_the_runs_seed_is_the_default(self, monkeypatch):
        monkeypatch.setenv("PL_GLOBAL_SEED", "5")
        assert toy_data(seed=None).fingerprint == toy_data(seed=5).fingerprint


class TestBatches:
    def test_have_the_sources_size_unless_given(self):
        assert toy_data(batch_size=5).batch_size == 5
        assert (
            FederatedDataModule(ToyData(batch_size=5), num_clients=2, batch_size=9).batch_size == 9
        )

    def test_have_the_size_of_a_sampler_of_whole_batches(self):
        sampler = torch.utils.data.BatchSampler(range(12), batch_size=4, drop_last=True)
        data = federated(DataLoader(Letters(), sampler=sampler, batch_size=None))
        assert (data.batch_size, data.drop_last) == (4, True)

    def test_held_out_batches_hold_every_example_once(self):
        data = toy_data(client_val_fraction=0.5, batch_size=4)
        for client, held in enumerate(data.held_out("validation")):
            batches = list(data.held_out_batches(client))
            assert [size for _, size in batches] == [len(part) for part in held.split(4)]
            found = torch.cat([x for (x, _), _ in batches])
            assert torch.equal(found, data.source.train.tensors[0][held])

    def test_held_out_batches_are_not_augmented(self):
        data = FederatedDataModule(
            Digits(augment=True, seed=0), num_clients=5, client_val_fraction=0.5, seed=0
        )
        (first, _), (second, _) = (next(data.held_out_batches(0))[0] for _ in range(2))
        assert torch.equal(first, second)
        one, other = (data.train_batch(data.clients[0])[0] for _ in range(2))
        assert not torch.equal(one, other)


class TestSource:
    def test_its_loaders_are_handed_through(self):
        data = toy_data()
        data.setup("fit")
        assert len(data.val_dataloader().dataset) == 60
        assert data.test_dataloader().batch_size == 32

    def test_only_what_it_has_is_handed_through(self):
        """Lightning asks `is_overridden` whether to validate, test and predict."""
        stages = ("val_dataloader", "test_dataloader", "predict_dataloader")
        bare, full = federated(DataLoader(Letters())), toy_data()
        assert [is_overridden(s, bare, LightningDataModule) for s in stages] == [False] * 3
        assert [is_overridden(s, full, LightningDataModule) for s in stages] == [True, True, False]

    def test_its_batch_hooks_are_handed_through(self):
        class Shifting(ToyData):
            def on_after_batch_transfer(self, batch, dataloader_idx):
                return batch + 1

        data = FederatedDataModule(Shifting(), num_clients=3, seed=0)
        assert data.on_after_batch_transfer(1, 0) == 2
        assert toy_data().on_after_batch_transfer(1, 0) == 1

    def test_its_own_training_loader_serves_central_training(self):
        data = toy_data(batch_size=7)
        data.setup("fit")
        assert isinstance(data.train_dataloader(), DataLoader)
        assert data.train_dataloader().batch_size == 7
        rounds = [[0, 1], [2]]
        data.train_in_rounds(rounds)
        assert data.train_dataloader() is rounds
        data.train_in_rounds(None)
        assert isinstance(data.train_dataloader(), DataLoader)

    def test_is_set_up_once_and_only_if_need_be(self):
        class Counting(ToyData):
            stages = ()

            def setup(self, stage):
                self.stages = (*self.stages, stage)
                super().setup(stage)

        data = FederatedDataModule(Counting(), num_clients=3, seed=0)
        assert data.source.stages == ()
        assert len(data.clients) == len(data.held_out("validation")) == 3
        assert data.source.stages == ("fit",)
        trained = FederatedDataModule(Counting(), num_clients=3, seed=0)
        trained.setup("fit")
        assert len(trained.clients) == 3
        assert trained.source.stages == ("fit",)

    def test_its_state_travels_along(self):
        class Remembering(ToyData):
            memory = 0

            def state_dict(self):
                return {"memory": self.memory}

            def load_state_dict(self, state_dict):
                self.memory = state_dict["memory"]

        one, other = (FederatedDataModule(Remembering(), num_clients=3, seed=0) for _ in range(2))
        one.source.memory = 7
        state = one.state_dict()
        assert state["partition"] == one.fingerprint
        other.load_state_dict(state)
        assert other.source.memory == 7


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Endless:
    def __getitem__(self, index):
        return index


class Doubling(DataLoader):
    """Goes its own way."""

    def __iter__(self):
        return (2 * x for x, _ in super().__iter__())


class TestRefuses:
    def test_no_number_where_the_partition_does_not_know(self):
        with pytest.raises(ConfigurationError, match="FederatedDataModule needs num_clients"):
            _ = FederatedDataModule(ToyData()).clients

    SEVERAL = r"got several \(.*Join their data sets"
    NO_INDEX = r"must return one DataLoader over a map-style data set .* got "

    @pytest.mark.parametrize(
        ("loader", "message"),
        [
            ([DataLoader(Letters())], SEVERAL),
            ({"a": DataLoader(Letters()), "b": DataLoader(Letters())}, SEVERAL),
            (CombinedLoader([DataLoader(Letters()), DataLoader(Letters())]), SEVERAL),
            (Letters(), NO_INDEX + "Letters"),
            (DataLoader(Stream()), NO_INDEX + "Stream"),
            (DataLoader(Endless()), NO_INDEX + "Endless"),
            (Doubling(Letters()), "Doubling with an __iter__ of its own"),
            (DataLoader(Letters(), batch_size=None), "batch_size=None: the items of its"),
        ],
        ids=["list", "dict", "combined", "no-loader", "stream", "no-length", "own-way", "batches"],
    )
    def test_loaders_that_cannot_be_divided(self, loader, message):
        with pytest.raises(ConfigurationError, match=message):
            _ = federated(loader).clients

    def test_batches_without_a_size(self):
        loader = DataLoader(Letters(), batch_sampler=[[0, 1], [2]])
        with pytest.raises(ConfigurationError, match=r"set data\.batch_size"):
            _ = federated(loader, ignore_sampler=True).batch_size
        assert federated(loader, ignore_sampler=True, batch_size=2).batch_size == 2
