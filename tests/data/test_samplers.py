"""What the source's sampler draws is what clients draw: counted by hand, or refused by name."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import LoaderData, toy_trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import AllClients
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.label_shards import LabelShards
from fl_lightning.data.shards import local_order
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.plan import LocalWork, WorkPlan

X, Y = torch.arange(40.0)[:, None], (torch.arange(40) % 10 == 0).long()
SET = TensorDataset(X, Y)
WEIGHTS = torch.where(Y == 1, 9.0, 1.0)


class Backwards(SequentialSampler):
    """A sampler of somebody's own, though of a known kind."""

    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


class Own(Sampler):
    """A sampler of somebody's own."""

    def __iter__(self):
        return iter(range(5))

    def __len__(self):
        return 5


class Pairwise(BatchSampler):
    """A batch sampler of somebody's own."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def federated(loader, **options):
    return FederatedDataModule(LoaderData(loader), **({"num_clients": 4, "seed": 0} | options))


def sampled(sampler, **options):
    return federated(DataLoader(SET, batch_size=5, sampler=sampler), **options)


def examples(data):
    return sorted(torch.cat(list(data.clients)).tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"batch_sampler": BatchSampler(RandomSampler(SET), 5, False)},
        {"batch_size": None, "sampler": BatchSampler(SequentialSampler(SET), 5, False)},
        {"sampler": torch.randperm(40).tolist()},
        {"sampler": SubsetRandomSampler(range(40))},
        {"sampler": RandomSampler(range(40))},
    ],
    ids=["shuffled", "batches", "lists", "order", "subset of all", "of a range"],
)
def test_if_all_are_drawn_examples_are_divided_alike(options):
    size = {} if "batch_sampler" in options else {"batch_size": 5}
    data, plain = federated(DataLoader(SET, **size | options)), federated(DataLoader(SET, 5))
    assert data.fingerprint == plain.fingerprint
    assert data.batch_size == 5
    assert data.draw_weights is None


class TestSome:
    """Only what the sampler draws has an owner, whatever the rule that divides it."""

    CHOSEN = (0, 3, 10, 11, 20, 27, 30, 39)

    @pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
    @pytest.mark.parametrize("of", [SubsetRandomSampler, lambda chosen: chosen])
    def test_examples_are_divided(self, of, kind):
        for partition in (None, LabelShards(classes_per_client=1)):
            data = sampled(of(kind(list(self.CHOSEN))), partition=partition)
            assert examples(data) == list(self.CHOSEN)
            assert data.summary().sizes.tolist() == [len(one) for one in data.clients] == [2] * 4
            assert data.train_indices.tolist() == list(self.CHOSEN)
        assert all(len(set(Y[shard].tolist())) == 1 for shard in data.clients)

    def test_whatever_draws_them(self):
        batches = BatchSampler(SubsetRandomSampler(self.CHOSEN), 3, drop_last=True)
        data = federated(DataLoader(SET, batch_sampler=batches))
        assert examples(data) == list(self.CHOSEN)
        assert (data.batch_size, data.drop_last) == (3, True)
        assert examples(sampled(RandomSampler(range(8)))) == list(range(8))
        assert examples(sampled(SequentialSampler(range(8)))) == list(range(8))
        # those that are repeated have several places
        assert examples(sampled(SubsetRandomSampler([5, 5, 7, 9]))) == [5, 5, 7, 9]

    def test_held_out_ones_are_among_them(self):
        data = sampled(SubsetRandomSampler(self.CHOSEN), num_clients=2, client_val_fraction=0.25)
        held = torch.cat(list(data.held_out("validation"))).tolist()
        assert len(held) == 2
        assert sorted([*held, *examples(data)]) == list(self.CHOSEN)

    def test_all_of_them_if_the_sampler_is_ignored(self):
        data = sampled(SubsetRandomSampler(self.CHOSEN), ignore_sampler=True)
        assert examples(data) == list(range(40))


class TestByWeight:
    """Inside a client, an example comes with its share of the client's weights."""

    def order(self, data, rounds, local_work=None, clients=(0, 1, 2, 3)):
        plan = WorkPlan(data, local_work or LocalWork(None, 1, 1, seed=3))
        for round_index in rounds:
            group = plan.of(clients, round_index)
            yield group

    def test_frequencies_are_the_normalised_weights(self):
        data = sampled(WeightedRandomSampler(WEIGHTS, 40))
        assert data.draw_weights is not None
        assert examples(data) == list(range(40))
        rounds = 600
        drawn = torch.cat([g.order for g in self.order(data, range(rounds))])
        counts = drawn.bincount(minlength=40).double()
        for shard in data.clients:
            share = WEIGHTS[shard].double() / WEIGHTS[shard].sum()
            draws = rounds * len(shard)
            assert counts[shard].sum() == draws
            spread = (draws * share * (1 - share)).sqrt()
            assert ((counts[shard] - draws * share).abs() < 5 * spread).all()

    def test_draws_depend_on_seed_round_and_client_alone(self):
        data = sampled(WeightedRandomSampler(WEIGHTS, 40))
        (one,), (again,) = self.order(data, [2]), self.order(data, [2])
        (alone,) = self.order(data, [2], clients=(1,))
        assert one.order.tolist() == again.order.tolist()
        assert one.order.split(one.num_examples.tolist())[1].tolist() == alone.order.tolist()
        (other,) = self.order(data, [3])
        assert one.order.tolist() != other.order.tolist()

    def test_one_batch_is_drawn_as_well(self):
        data = federated(
            DataLoader(SET, batch_size=40, sampler=WeightedRandomSampler(WEIGHTS, 40)),
            num_clients=1,
        )
        (group,) = self.order(data, [0], clients=(0,))
        assert group.sizes.tolist() == [40]
        assert Y[group.order].float().mean() > 0.25  # expected: 0.5, of all examples: 0.1

    @pytest.mark.parametrize("sizes", [(7, 5), (3, 5)])
    def test_against_torch(self, sizes):
        num_examples, batch_size = sizes
        shard, weights = torch.arange(100, 100 + num_examples), torch.arange(1.0, num_examples + 1)
        order, found = local_order(
            shard,
            batch_size,
            lambda: torch.Generator().manual_seed(4),
            num_epochs=2,
            weights=torch.cat([torch.zeros(100), weights]).double(),
        )
        generator = torch.Generator().manual_seed(4)
        sampler = WeightedRandomSampler(weights.tolist(), num_examples, generator=generator)
        assert order.tolist() == [100 + place for _ in range(2) for place in sampler]
        assert len(found) == 2 * math.ceil(num_examples / batch_size)

    def test_examples_of_weight_zero_belong_to_nobody_and_with_replacement_all_weights_are_one(
        self,
    ):
        weights = [float(i % 2) for i in range(40)]
        data = sampled(WeightedRandomSampler(weights, 40))
        assert examples(data) == list(range(1, 40, 2))
        data = sampled(RandomSampler(SET, replacement=True))
        assert data.draw_weights[[3, 5]].tolist() == [1.0, 1.0]
        (group,) = self.order(data, [0])
        assert len(group.order) == 40
        assert len(group.order.unique()) < 40

    @pytest.mark.parametrize("engine", ["sequential", "slots"])
    def test_in_a_run_half_of_what_trains_is_rare(self, engine):
        class Noting(LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(1, 2)

            def training_step(self, batch, batch_idx):
                self.log("share", batch[1].float().mean())
                return F.cross_entropy(self.net(batch[0] / 40), batch[1])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

        data = sampled(WeightedRandomSampler(WEIGHTS, 40))
        federation = Federation(cohort=AllClients(), local_epochs=50, engine=engine, seed=0)
        trainer = toy_trainer(federation, max_epochs=1)
        trainer.fit(Noting(), datamodule=data)
        expected = np.mean([(WEIGHTS * Y)[s].sum() / WEIGHTS[s].sum() for s in data.clients])
        assert abs(float(trainer.callback_metrics["share"]) - expected) < 0.05


class TestRefuses:
    @pytest.mark.parametrize(
        ("sampler", "name"),
        [
            (Backwards(SET), "Backwards"),
            (Own(), "Own"),
            (DistributedSampler(SET, 2, 0), "DistributedSampler"),
            (WeightedRandomSampler(WEIGHTS, 40, replacement=False), "replacement=False"),
            ((i for i in range(3)), "generator"),
            (["a", "b"], "a sampler of str"),
        ],
        ids=["subclass", "own", "distributed", "without replacement", "generator", "keys"],
    )
    def test_samplers_by_name(self, sampler, name):
        message = rf"LoaderData.train_dataloader\(\) draws its examples by .*{name}.*ignore_sampler"
        with pytest.raises(ConfigurationError, match=message):
            examples(sampled(sampler))
        assert examples(sampled(sampler, ignore_sampler=True)) == list(range(40))

    @pytest.mark.parametrize(
        "batches",
        [[[0, 1], [2]], Pairwise(SequentialSampler(SET), 2, False), BatchSampler(Own(), 2, False)],
        ids=["list", "subclass", "of an own sampler"],
    )
    def test_batch_samplers_by_name(self, batches):
        loader = DataLoader(SET, batch_sampler=batches)
        with pytest.raises(ConfigurationError, match=r"draws its examples by (list|Pairwise|Own)"):
            examples(federated(loader, batch_size=2))
        data = federated(loader, batch_size=2, ignore_sampler=True)
        assert examples(data) == list(range(40))
        assert data.train_batch(torch.tensor([4, 2]))[0].tolist() == [[4.0], [2.0]]

    @pytest.mark.parametrize(
        ("sampler", "message"),
        [
            (
                WeightedRandomSampler(WEIGHTS, 1000),
                "num_samples=1000 for 40 examples.*federation.local_steps",
            ),
            (
                RandomSampler(SET, num_samples=10),
                "num_samples=10 for 40 examples.*federation.local_steps",
            ),
            (WeightedRandomSampler([1.0] * 41, 41), "has 41 weights for 40 examples"),
            ([3, -1], "draws example -1, but the data set"),
            ([3, 40], "draws example 40, but the data set"),
        ],
        ids=["passes of weighted", "of random", "more weights", "negative", "too many"],
    )
    def test_what_does_not_fit(self, sampler, message):
        with pytest.raises(ConfigurationError, match=message):
            examples(sampled(sampler))


class Keyed(Dataset):
    """Items by a list of indices at once."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index]


def test_batches_of_lists_are_asked_for_at_once():
    batches = BatchSampler(RandomSampler(Keyed()), 4, drop_last=False)
    data = federated(DataLoader(Keyed(), batch_size=None, sampler=batches))
    assert data.train_batch(torch.tensor([7, 3])).tolist() == [[7.0], [3.0]]
