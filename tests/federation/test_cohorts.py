"""What the server learns of clients, and what samplers make of it in a run."""

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from toys import SaveEverywhere, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import AllClients, Federation, Personal, UniformCohort
from fl_lightning.data import (
    AvailableCohort,
    ByLossCohort,
    LeastRecentCohort,
    OortCohort,
    PowerOfChoiceCohort,
    Stretches,
)
from fl_lightning.federation.visits.client_visits import measured_losses


def run(cohort, *callbacks, ckpt_path=None, max_epochs=4, module=None, **options):
    seed_everything(0, verbose=False)
    module = module or ToyModule(dropout=0.3, scheduler=False)
    options = {"local_steps": 2, "seed": 3, **options}
    federation = Federation(cohort=cohort, **options)
    trainer = toy_trainer(federation, *callbacks, max_epochs=max_epochs)
    trainer.fit(module, datamodule=toy_data(), ckpt_path=ckpt_path)
    return module, federation.rounds


def test_rounds_without_anybody_leave_the_model_as_it_is():
    module, _ = run(AvailableCohort(AllClients(), Stretches(fraction=1e-9)))
    seed_everything(0, verbose=False)
    assert torch.equal(weights(module), weights(ToyModule(dropout=0.3, scheduler=False)))


@pytest.mark.parametrize(
    "cohort",
    [
        PowerOfChoiceCohort(size=3, num_candidates=5),
        OortCohort(size=3),
        ByLossCohort(size=3),
        AvailableCohort(LeastRecentCohort(size=2), Stretches()),
    ],
    ids=lambda cohort: type(cohort).__name__,
)
def test_resumed_anywhere_a_run_draws_the_same_clients(tmp_path, cohort):
    expected, rounds = run(cohort, SaveEverywhere(tmp_path))
    for moment in ("0-trained", "1-end", "2-trained", "3-trained"):
        module, resumed = run(cohort, ckpt_path=tmp_path / f"{moment}.ckpt")
        assert torch.equal(weights(module), weights(expected)), moment
        population, other = rounds.run.cohorts.population, resumed.run.cohorts.population
        np.testing.assert_array_equal(population.losses, other.losses)
        np.testing.assert_array_equal(population.last_rounds, other.last_rounds)


def test_what_is_known_is_the_last_training_loss():
    _, rounds = run(UniformCohort(size=3), max_epochs=3)
    population = rounds.run.cohorts.population
    last = {}
    for number in range(3):
        for client in UniformCohort(size=3).sample(number, population, 3).tolist():
            last[client] = number
    seen = np.flatnonzero(population.last_rounds >= 0)
    assert {c: int(population.last_rounds[c]) for c in seen} == last
    losses = rounds.record.means.by_client("train/loss")
    assert {c: population.losses[c] for c in losses} == losses
    assert np.isnan(population.losses[population.last_rounds < 0]).all()


class Watched(ToyModule):
    """Keeps the losses that a sampler would see, by plain PyTorch."""

    def on_train_epoch_start(self):
        data = self.trainer.datamodule
        self.eval()
        with torch.no_grad():
            self.losses = [
                float(torch.nn.functional.cross_entropy(self.net(x), y))
                for x, y in (data.train_batch(shard) for shard in data.clients)
            ]
        self.train()


def test_fresh_losses_are_those_of_the_present_model():
    module, found = Watched(dropout=0.3), []

    class Keep(PowerOfChoiceCohort):
        def sample(self, round_index, population, seed):
            found.append((module.losses, population.losses.copy()))
            return super().sample(round_index, population, seed)

    run(Keep(size=2, num_candidates=6), module=module, max_epochs=3)
    assert len(found) == 3
    for expected, losses in found:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_fresh_losses_are_those_of_clients_own_layers():
    """FedPer: a client's loss is that of the shared body under its own head."""
    found = []

    class Keep(PowerOfChoiceCohort):
        def sample(self, round_index, population, seed):
            found.append(population.losses.copy())
            return super().sample(round_index, population, seed)

    class WatchedHeads(ToyModule):
        def on_train_epoch_start(self):
            (federation,) = (c for c in self.trainer.callbacks if isinstance(c, Federation))
            models, data = federation.personal_models(self.trainer), self.trainer.datamodule
            self.losses = []
            for client, shard in enumerate(data.clients):
                x, y = data.train_batch(shard)
                with models.of(client), torch.no_grad():
                    self.losses.append(float(nn.functional.cross_entropy(self.net(x), y)))
            expected.append(self.losses)

    expected = []
    personal = Personal(["net.4.*"])
    module = WatchedHeads()
    run(Keep(size=2, num_candidates=6), module=module, personal=personal, max_epochs=4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_measuring_losses_leaves_no_trace():
    module, federation = ToyModule(dropout=0.3, batch_norm=True), Federation()
    trainer = toy_trainer(federation, max_epochs=1)
    trainer.fit(module, datamodule=toy_data(batch_size=60))
    before = weights(module)
    found = measured_losses(trainer, np.arange(6), 1, seed=0)
    assert sorted(found) == list(range(6))
    assert torch.equal(weights(module), before)
    assert module.training
    assert found == measured_losses(trainer, np.arange(6), 1, seed=0)


def test_drawn_by_size_over_processes_as_in_one():
    def fit(devices):
        seed_everything(0, verbose=False)
        module = ToyModule()
        cohort = PowerOfChoiceCohort(size=3, num_candidates=5)
        federation = Federation(cohort=cohort, local_steps=2, seed=3)
        several = {"devices": 2} if devices == 2 else {}
        trainer = toy_trainer(federation, max_epochs=3, **several)
        trainer.fit(module, datamodule=toy_data())
        return weights(module)

    torch.testing.assert_close(fit(2), fit(1), rtol=0, atol=1e-6)
