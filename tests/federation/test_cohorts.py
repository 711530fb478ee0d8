"""What the server learns of clients, and what samplers make of it in a run."""

from functools import partial

import numpy as np
import torch
from torch import nn
from toys import ToyModule, federated

from fl_lightning import Federation, Personal, UniformCohort
from fl_lightning.data import (
    PowerOfChoiceCohort,
)

Dropping = partial(ToyModule, dropout=0.3, scheduler=False)


def run(cohort, module=Dropping, **options):
    module, _, federation = federated(module, cohort=cohort, local_steps=2, seed=3, **options)
    return module, federation.rounds


def test_what_is_known_is_the_last_training_loss():
    _, rounds = run(UniformCohort(size=3))
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

    run(Keep(size=2, num_candidates=6), module=module)
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
    run(Keep(size=2, num_candidates=6), module=module, personal=personal)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
