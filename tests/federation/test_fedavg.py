"""The Trainer's path against plain loops and closed forms."""

import numpy as np
import pytest
import torch
from quadratics import trajectory
from torch.nn import functional as F
from toys import ToyModule, toy, toy_data, toy_trainer, weights

from fl_lightning import CentralDP, ConfigurationError, Federation, UniformCohort
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.core.seeds import derive_seed
from fl_lightning.data import IID
from fl_lightning.federation import SimpleFederation
from fl_lightning.secure import SecureMean
from fl_lightning.server import (
    AFL,
    Bucketing,
    FedAsync,
    FedBuff,
    GeometricMedian,
    Mean,
    Median,
    NormBounding,
    QFedAvg,
)


def plain_fedavg(module, data, *, rounds, cohort, epochs, seed, server_lr=1.0, column=None):
    """FedAvg as the paper writes it, with nothing of the package but the seeds and the data.

    A client's weight is the sum of a column over its examples, 1 each if there is no column.
    """
    data.setup("fit")
    x, y = data.train_dataset.tensors
    model = {n: p.detach().clone() for n, p in module.named_parameters()}
    lr = 0.1
    for r in range(rounds):
        rng = np.random.default_rng(derive_seed(seed, "cohort", r))
        chosen = sorted(rng.choice(len(data.clients), cohort, replace=False).tolist())
        total, delta = 0, {n: torch.zeros_like(p) for n, p in model.items()}  # a running mean
        for k in chosen:
            module.load_state_dict(model)
            optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
            torch.manual_seed(derive_seed(seed, "local training", r, k))
            order = torch.Generator().manual_seed(derive_seed(seed, "shuffle", r, k))
            shard = data.clients[k]
            for _ in range(epochs):
                epoch = shard  # one batch has no order
                if len(shard) > 8:
                    epoch = shard[torch.randperm(len(shard), generator=order)]
                for batch in epoch.split(8):
                    logits = module.net(x[batch])
                    loss = F.cross_entropy(logits, y[batch])
                    module.net(x[batch])  # as the toy's training step does, for its dropout
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            weight = len(shard) if column is None else int(column[shard].sum())
            total += weight
            for n, p in module.named_parameters():
                delta[n].lerp_(model[n] - p.detach(), weight / total)
        lr *= 0.9
        model = {n: p - server_lr * delta[n] for n, p in model.items()}
    return torch.cat([p.flatten() for p in model.values()])


@pytest.mark.parametrize(("dropout", "server_lr"), [(0.0, 1.0), (0.5, 0.5)])
def test_equals_a_plain_loop_bit_for_bit(dropout, server_lr):
    data = toy_data(dtype=torch.float64)
    module = toy(dropout=dropout).double()
    start = {n: p.clone() for n, p in module.state_dict().items()}
    options = {"cohort": UniformCohort(size=3), "local_epochs": 2, "seed": 5}
    options["server_optimizer"] = lambda params: torch.optim.SGD(params, lr=server_lr)
    toy_trainer(Federation(**options), precision="64-true").fit(module, datamodule=data)
    ours = weights(module)

    module.load_state_dict(start)
    module.train()
    settings = {"rounds": 3, "cohort": 3, "epochs": 2, "seed": 5}
    theirs = plain_fedavg(module, data, **settings, server_lr=server_lr)
    assert torch.equal(ours, theirs)


TOKENS = torch.arange(60) ** 2 % 17 + 1  # of each example


def weighted(column, **options):
    """Return the model of three rounds whose updates are weighted by a column, and its data."""
    data = toy_data(dtype=torch.float64)
    data.update_weight = column
    settings = {"cohort": UniformCohort(size=3), "local_epochs": 2, "seed": 5, **options}
    module = toy(ToyModule).double()
    toy_trainer(Federation(**settings), precision="64-true").fit(module, datamodule=data)
    return weights(module), data


def test_updates_are_weighted_by_the_sum_of_a_column_bit_for_bit():
    ours, data = weighted(TOKENS)
    assert data.update_weights.tolist() == [int(TOKENS[shard].sum()) for shard in data.clients]
    module = toy(ToyModule).double().train()
    options = {"rounds": 3, "cohort": 3, "epochs": 2, "seed": 5}
    assert torch.equal(ours, plain_fedavg(module, data, **options, column=TOKENS))
    assert not torch.equal(ours, weighted(None)[0])
    torch.testing.assert_close(ours, weighted(TOKENS, engine="slots")[0])


@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": NormBounding(weight_by_examples=True)},
        {"aggregator": Bucketing(rule=GeometricMedian(weight_by_examples=True))},
        {"aggregator": QFedAvg(q=0.0, weight_by_examples=True)},
        {
            "asynchronous": FedBuff(concurrency=3, buffer_size=2),
            "devices": Devices(speeds=LogNormalSpeeds()),
            "cohort": None,
        },
    ],
)
def test_whatever_weights_by_examples_follows_the_column(options):
    assert not torch.equal(weighted(TOKENS, **options)[0], weighted(None, **options)[0])


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_metrics_stay_means_over_examples(engine):
    found = []
    for column in (TOKENS, None):
        data, module = toy_data(dtype=torch.float64), toy(ToyModule).double()
        data.update_weight = column
        trainer = toy_trainer(Federation(engine=engine, seed=5), max_epochs=1)
        trainer.fit(module, datamodule=data)  # of one round, which starts from the same model
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert {name: found[0][name] for name in ("train/loss", "train/accuracy")} == {
        name: found[1][name] for name in ("train/loss", "train/accuracy")
    }


def test_a_run_resumes_with_its_weights_of_updates(tmp_path):
    def fit(column, **options):
        data = toy_data(dtype=torch.float64)
        data.update_weight = column
        module = toy(ToyModule).double()
        trainer = toy_trainer(Federation(seed=5), precision="64-true", **options)
        return trainer, lambda path=None: trainer.fit(module, datamodule=data, ckpt_path=path)

    trainer, start = fit(TOKENS, max_epochs=1)
    start()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    for column in (None, TOKENS + 1):
        with pytest.raises(ConfigurationError, match=r"with another data\.update_weight"):
            fit(column, max_epochs=2)[1](tmp_path / "one.ckpt")
    fit(TOKENS, max_epochs=2)[1](tmp_path / "one.ckpt")


def test_without_a_trainer_a_column_needs_an_aggregator_that_weights_by_examples():
    data, module = toy_data(), ToyModule()
    data.update_weight = TOKENS
    data.setup("fit")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="Median weights clients alike"):
        SimpleFederation(module, optimizer, data, aggregator=Median())


def test_the_weights_of_updates_leave_steps_of_several_batches_alone():
    settings = {"local_epochs": 2, "seed": 5}
    found = []
    for column in ([4] * 60, None):
        data, module = toy_data(dtype=torch.float64), toy(ToyModule).double()
        data.update_weight = column
        trainer = toy_trainer(Federation(**settings), accumulate_grad_batches=2)
        trainer.fit(module, datamodule=data)
        found.append(weights(module))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([0.5] * 60, {}, "one whole number ≥ 0 per example, got float64"),
        ([-1] + [1] * 59, {}, "minimum -1"),
        ([0] * 60, {}, "client 0 sum to 0"),
        ([1] * 59, {}, "has 60 examples, got 59 values"),
        ([2000] * 60, {"aggregator": SecureMean(clip=1.0)}, "set its max_examples to"),
        ([1] * 60, {"privacy": CentralDP(clip_norm=1.0, noise_multiplier=1.0)}, "does not cover"),
        ([1] * 60, {"aggregator": Median()}, "Median weights clients alike"),
        ([1] * 60, {"aggregator": Mean(weight_by_examples=False)}, "Mean weights clients alike"),
        ([1] * 60, {"aggregator": Bucketing(rule=NormBounding())}, "leave update_weight out"),
        ([1] * 60, {"aggregator": QFedAvg()}, "leave update_weight out"),
        ([1] * 60, {"aggregator": AFL()}, "leave update_weight out"),
        (
            [1] * 60,
            {"asynchronous": FedAsync(concurrency=2), "cohort": None},
            "FedAsync steps on one update at a time",
        ),
    ],
)
def test_what_is_no_weight_of_updates_is_refused(column, options, message):
    with pytest.raises(ConfigurationError, match=message):
        weighted(column, **options)


@pytest.mark.parametrize(
    ("steps", "first", "last"),
    [
        ((10, 10), [4.96976691, 5.85121734, 6.00755362], 6.04126008),
        ((2, 10), [4.96976691, 6.99754765, 7.82492946], 8.39520708),
    ],
)
def test_two_quadratics_have_their_closed_form(steps, first, last):
    values, _ = trajectory(steps, rounds=40)  # which halve the distance, or better
    assert values[:3] == pytest.approx(first, abs=5e-9)
    assert values[-1] == pytest.approx(last, abs=5e-9)


def test_one_client_with_all_data_is_ordinary_local_training():
    data = toy_data(num_clients=1, partition=IID(), dtype=torch.float64)
    module = ToyModule().double()
    start = {n: p.clone() for n, p in module.state_dict().items()}
    toy_trainer(Federation(seed=1), max_epochs=1, precision="64-true").fit(module, datamodule=data)
    ours = weights(module)

    module.load_state_dict(start)
    theirs = plain_fedavg(module, data, rounds=1, cohort=1, epochs=1, seed=1)
    local = torch.cat([p.detach().flatten() for p in module.parameters()])  # the client's own end
    torch.testing.assert_close(ours, local, rtol=1e-14, atol=1e-16)
    assert torch.equal(ours, theirs)


def test_one_full_batch_step_of_everybody_is_one_step_on_the_pooled_data():
    data = toy_data(dtype=torch.float64, batch_size=1000)
    module = ToyModule(momentum=0.0).double()
    start = {n: p.clone() for n, p in module.state_dict().items()}
    federation = Federation(local_steps=1)
    toy_trainer(federation, max_epochs=1, precision="64-true").fit(module, datamodule=data)
    ours = weights(module)

    module.load_state_dict(start)
    x, y = data.train_dataset.tensors
    module.zero_grad()
    F.cross_entropy(module.net(x), y).backward()
    pooled = torch.cat([(p - 0.1 * p.grad).flatten() for p in module.parameters()])
    torch.testing.assert_close(ours, pooled, rtol=1e-12, atol=1e-14)
