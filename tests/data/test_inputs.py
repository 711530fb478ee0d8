"""Transformations of inputs: federated statistics are the pooled ones, and every batch is changed once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ToyData, ToyModule, toy_trainer

from fl_lightning import ConfigurationError, FederatedDataModule, Federation
from fl_lightning.data import Digits, FederatedNormalize, Iris, Normalize, Reshape
from fl_lightning.data.inputs import mean_and_variance, on_inputs


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    centre=st.floats(-100, 100),
    shape=st.sampled_from([(3,), (2, 4, 4)]),
)
def test_statistics_are_those_of_the_pooled_examples(sizes, centre, shape):
    if not sum(sizes):
        return
    torch.manual_seed(0)
    clients = [centre + torch.randn(n, *shape, dtype=torch.float64) for n in sizes]
    mean, variance = mean_and_variance(client.split(2) for client in clients if len(client))
    columns = torch.cat(clients).reshape(sum(sizes), shape[0], -1)
    torch.testing.assert_close(mean, columns.mean((0, 2)))
    expected = columns.var((0, 2), correction=0)
    torch.testing.assert_close(variance, expected, rtol=1e-6, atol=1e-9)


def wrapped(source, **options):
    data = FederatedDataModule(source, num_clients=5, seed=0, **options)
    data.setup("fit")
    return data


@pytest.mark.parametrize("source", [Iris(seed=0), Digits(seed=0)], ids=["iris", "digits"])
def test_all_clients_together_have_mean_zero_and_variance_one(source):
    data = wrapped(source, transforms=[FederatedNormalize()])
    pooled = torch.cat([data.train_batch(shard)[0] for shard in data.clients]).transpose(0, 1)
    columns = pooled.flatten(1)
    torch.testing.assert_close(columns.mean(1), torch.zeros(len(columns)), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        columns.var(1, correction=0), torch.ones(len(columns)), rtol=0, atol=1e-4
    )


def test_evaluation_and_central_training_see_the_same_inputs():
    plain, changed = wrapped(Iris(seed=0)), wrapped(Iris(seed=0), transforms=[FederatedNormalize()])
    [scale] = changed.fitted_transforms
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        for _ in range(2):  # asked twice, changed once
            [(x, y)], [(z, w)] = getattr(plain, name)(), getattr(changed, name)()
            assert torch.equal(scale(x), z)
            assert torch.equal(y, w)
    [(x, _)] = changed.train_dataloader()
    torch.testing.assert_close(x.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    indices = torch.arange(5)
    assert torch.equal(changed.train_batch(indices)[0], scale(plain.train_batch(indices)[0]))
    held = wrapped(Iris(seed=0), transforms=[Normalize([1.0], [2.0])], client_val_fraction=0.3)
    (batch, size), *_ = held.held_out_batches(0)
    assert torch.equal(batch[0], (plain.train_batch(held.held_out("validation")[0])[0] - 1) / 2)
    assert size == len(held.held_out("validation")[0])


def test_transforms_run_in_order_and_later_ones_learn_from_earlier():
    halves = [Reshape([2, 2]), FederatedNormalize(eps=0.0)]
    data = wrapped(Iris(seed=0), transforms=halves)
    pooled = torch.cat([data.train_batch(shard)[0] for shard in data.clients])
    assert pooled.shape[1:] == (2, 2)
    torch.testing.assert_close(pooled.mean((0, 2)), torch.zeros(2), rtol=0, atol=1e-5)


def test_a_federation_trains_on_them():
    source = ToyData(batch_size=60)
    data = FederatedDataModule(source, num_clients=3, transforms=[FederatedNormalize()])
    trainer = toy_trainer(Federation(local_steps=2, seed=0), max_epochs=1)
    trainer.fit(ToyModule(), datamodule=data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reshape([3]).fit(list)(torch.zeros(2, 4)), "shape \\(4,\\) does not fit into"),
        (lambda: Normalize([0.0] * 3, [1.0] * 3).fit(list)(torch.zeros(2, 4)), "give one, or 4"),
        (lambda: FederatedNormalize().fit(list), "have no training examples"),
        (lambda: on_inputs([torch.neg], {"x": torch.zeros(1)}), "got dict"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
