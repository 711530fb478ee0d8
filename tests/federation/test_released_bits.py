"""Bits of what is released do not tell which of two updates lay below the noise (Mironov 2012).

Whoever knows both candidates looks, number by number, for noise in floating point that leads from a
candidate to what was released: from the one that was there it always does. In 200 rounds the guesses are
right by chance, 100 times give or take 7; 129 is four standard deviations more than that.
"""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset
from toys import Notes

from fl_lightning import (
    AllClients,
    BandedMatrixDP,
    CentralDP,
    DistributedDP,
    ExampleDP,
    FederatedDataModule,
    Federation,
    LocalDP,
)
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.privacy.private_mean import AdaptiveClip

SIZE, ROUNDS, MOST_RIGHT = 2000, 200, 129
NOISE = 20.0
SECRETS = np.random.default_rng(7).integers(0, 2, ROUNDS)


def candidates():
    """Return two updates of norm 0.9, float32, shape (2, k)."""
    both = np.random.default_rng(1).normal(size=(2, SIZE))
    both *= 0.9 / np.linalg.norm(both, axis=1, keepdims=True)
    return both.astype(np.float32)


class OneOfTwo(LightningModule):
    """Has, in every round, one of two vectors for a gradient, by a coin; its weights stay 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("both", torch.from_numpy(candidates()), persistent=False)

    def training_step(self, batch, batch_idx):
        chosen = self.both[int(SECRETS[self.current_epoch])]
        return (self.weight * chosen).sum() * batch[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Observer(torch.optim.SGD):
    """A server's optimizer that keeps the model where it is, and what it was given."""

    def __init__(self, params, seen):
        super().__init__(params, lr=0.0)
        self.seen = seen

    def step(self, closure=None):
        [weight] = self.param_groups[0]["params"]
        self.seen.add(weight.grad.detach().clone())
        return super().step(closure)


class ModelObserver(Observer):
    """The same, of the model after a step from 0, which is then taken back."""

    def step(self, closure=None):
        [weight] = self.param_groups[0]["params"]
        moved = weight.detach() - weight.grad
        self.seen.add(-moved)
        return torch.optim.SGD.step(self, closure)


def released(privacy, cohort=None, observer=Observer):
    """Return what the server released in every round, float32, shape (rounds, k)."""
    seen = Notes()
    federation = Federation(
        privacy=privacy,
        cohort=cohort or AllClients(),
        local_steps=1,
        engine="sequential",
        server_optimizer=lambda params: observer(params, seen),
        seed=3,
    )
    trainer = Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        callbacks=[federation],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    examples = LightningDataModule.from_datasets(TensorDataset(torch.ones(1, 1)))
    trainer.fit(OneOfTwo(), datamodule=FederatedDataModule(examples, num_clients=1))
    rows = [row for row in seen.read() if len(row) == SIZE]  # others tried the optimizer
    assert len(rows) == ROUNDS
    return torch.stack(rows).numpy()


def neighbours(x):
    low, high = np.float32(-np.inf), np.float32(np.inf)
    return np.stack([np.nextafter(x, low), x, np.nextafter(x, high)])


def is_explained(seen, candidate, scales):
    """Return which numbers are a candidate's plus noise, added in float32."""
    rest = (seen.astype(np.float64) - candidate).astype(np.float32)
    explained = np.zeros(len(seen), bool)
    for noise in neighbours(rest):
        leads_there = (candidate + noise).astype(np.float32) == seen
        if scales:  # a float32 normal number times the noise's standard deviation
            unit = neighbours((noise / np.float32(NOISE)).astype(np.float32))
            leads_there &= ((unit * np.float32(NOISE)) == noise).any(0)
        explained |= leads_there
    return explained


def guess(seen, coin):
    """Return which candidate lay below: the only one that explains all numbers, or more of them."""
    scores = [
        [is_explained(seen, c, scales).mean() for c in candidates()] for scales in (True, False)
    ]
    for one, other in scores:
        if (one == 1) != (other == 1):
            return int(other == 1)
    one, other = map(sum, zip(*scores, strict=True))
    return coin if one == other else int(other > one)


def right_guesses(seen):
    coins = np.random.default_rng(5).integers(0, 2, ROUNDS)
    return sum(guess(*row) == secret for *row, secret in zip(seen, coins, SECRETS, strict=True))


def test_the_attack_finds_noise_in_floating_point():
    """The attack is one: noise that is added in float32 does not stand it."""
    both, generator = candidates(), np.random.default_rng(0)
    normals = generator.standard_normal((ROUNDS, SIZE)).astype(np.float32)
    seen = both[SECRETS] + normals * np.float32(NOISE)
    assert right_guesses(seen) == ROUNDS
    unscaled = generator.normal(scale=NOISE, size=(ROUNDS, SIZE)).astype(np.float32)
    assert right_guesses(both[SECRETS] + unscaled) > 150


noise = {"clip_norm": 1.0, "noise_multiplier": NOISE}
MECHANISMS = {
    "central": (CentralDP(**noise), None),
    "adaptive": (
        CentralDP(**noise, adaptive_clip=AdaptiveClip(bits_stddev=100.0, learning_rate=1e-9)),
        None,
    ),
    "banded": (BandedMatrixDP(**noise, bands=1), RoundRobinCohort(size=1)),
    "local": (LocalDP(**noise), None),
    "distributed": (DistributedDP(**noise, min_shares=1), None),
    "example": (ExampleDP(**noise), None),
}


@pytest.mark.filterwarnings("ignore:privacy:UserWarning")
@pytest.mark.parametrize("name", MECHANISMS)
def test_bits_of_what_is_released_tell_nothing(name):
    privacy, cohort = MECHANISMS[name]
    seen = released(privacy, cohort)
    assert abs(float(seen.std()) / NOISE - 1) < 0.01
    assert ROUNDS - MOST_RIGHT <= right_guesses(seen) <= MOST_RIGHT


@pytest.mark.filterwarnings("ignore:privacy:UserWarning")
def test_bits_of_the_model_after_the_servers_step_tell_nothing():
    seen = released(CentralDP(**noise), observer=ModelObserver)
    assert ROUNDS - MOST_RIGHT <= right_guesses(seen) <= MOST_RIGHT
