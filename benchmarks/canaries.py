"""A federated private training on digits, with canaries in it by coins, for one-run audits.

Every canary has a number of the model for itself, which no digit moves, and pushes it as far as
clipping lets it: nothing hides it but the noise. It is a client, or one example of a client. Those
that the coins leave out push nothing, which for the sums is as if they were not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.audits.one_run_audit import Guesses, guesses_by_score
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.cohorts.cohort import AllClients, Cohort
from fl_lightning.federation.federation import Federation
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy

CLASSES, TEST = 10, 297
# how hard a canary pushes: far beyond any clip norm
_FAR = 1e4


class CanaryClassifier(LightningModule):
    """A perceptron for digits with a number for each canary.

    Args:
        is_in: which canaries are in the run, shape (m,).
        lr: of the clients' SGD.
    """

    def __init__(self, is_in: npt.NDArray[np.bool_], lr: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
        self.room = nn.Parameter(torch.zeros(len(is_in)))
        self.register_buffer("is_in", torch.from_numpy(is_in).double())  # not averaged as floats
        self.is_in: Tensor
        self._lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the digits' cross-entropy, and the push of canaries, whose labels come after."""
        images, labels = batch
        digits = functional.cross_entropy(
            self.net(images), labels.clamp(max=CLASSES - 1), reduction="none"
        )
        place = (labels - CLASSES).clamp(min=0)
        push = -_FAR * self.room[place] * self.is_in[place].float()
        return torch.where(labels < CLASSES, digits, push).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy on held-out digits."""
        images, labels = batch
        self.log("val/accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self._lr)


class CanaryDigits(LightningDataModule):
    """1,500 digits to train on, and a black image for each canary, labelled by its number.

    Args:
        num_canaries: m.
        batch_size: examples of a local step.
    """

    def __init__(self, num_canaries: int, batch_size: int) -> None:
        super().__init__()
        table = load_digits()
        images = torch.from_numpy(table.images).float().view(-1, 1, 8, 8) / 8 - 1
        labels = torch.from_numpy(table.target).long()
        own = CLASSES + torch.arange(num_canaries)
        black = -torch.ones(num_canaries, 1, 8, 8)
        self.batch_size = batch_size
        self.train = TensorDataset(
            torch.cat([images[TEST:], black]), torch.cat([labels[TEST:], own])
        )
        self.test = TensorDataset(images[:TEST], labels[:TEST])

    def train_dataloader(self) -> DataLoader[Any]:
        """Return digits and canaries."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the digits held out."""
        return DataLoader(self.test, batch_size=TEST)


@dataclass(frozen=True)
class Shards:
    """Digits to clients in turn; canaries to clients of their own, or among the others.

    Attributes:
        apart: whether each canary is a client.
    """

    apart: bool

    def assign(self, labels: npt.NDArray[Any], num_clients: int, seed: int) -> Any:
        """Return one array of positions per client; canaries' clients come last."""
        order = numpy_generator(seed, "partition").permutation(len(labels))
        canaries = order[labels[order] >= CLASSES]
        if not self.apart:
            return np.array_split(order, num_clients)
        digits = order[labels[order] < CLASSES]
        alone = [np.array([place]) for place in np.sort(canaries)]
        return [*np.array_split(digits, num_clients - len(alone)), *alone]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One private training and what an observer of its last model makes of it.

    Attributes:
        privacy: what is audited: of clients, or of examples.
        num_canaries: m.
        num_clients: that have digits.
        rounds: of the run.
        batch_size: of local steps.
        cohort: who takes part.
        share: of the canaries that are guessed.
        seed: of coins and run.
    """

    privacy: Privacy | ExampleDP
    num_canaries: int = 2000
    num_clients: int = 500
    rounds: int = 10
    batch_size: int = 16
    cohort: Cohort = field(default_factory=AllClients)
    share: float = 0.2
    seed: int = 0

    def __call__(self) -> tuple[Guesses, float | None, float]:
        """Return the guesses, the accounted ε, None where it is infinite, and the accuracy."""
        apart = not isinstance(self.privacy, ExampleDP)
        is_in = numpy_generator(self.seed, "coins").random(self.num_canaries) < 0.5
        seed_everything(self.seed, verbose=False)
        clients = self.num_clients + (self.num_canaries if apart else 0)
        source = CanaryDigits(self.num_canaries, self.batch_size)
        # means are over canaries as well, which move no weight of the digits
        lr = len(source.train) / (len(source.train) - self.num_canaries)
        lr = clients / self.num_clients if apart else lr
        federation = Federation(
            cohort=self.cohort,
            local_steps=1,
            privacy=self.privacy,
            server_optimizer=lambda params: torch.optim.SGD(params, lr=lr),
            engine="sequential",
            seed=self.seed,
        )
        trainer = Trainer(
            callbacks=[federation],
            max_epochs=self.rounds,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=self.rounds,
        )
        module = CanaryClassifier(is_in, lr=0.5)
        data = FederatedDataModule(
            source, num_clients=clients, partition=Shards(apart), seed=self.seed
        )
        trainer.fit(module, datamodule=data)
        facts = trainer.callback_metrics
        epsilon = float(facts["privacy/epsilon"]) if "privacy/epsilon" in facts else None
        scores = module.room.detach().double().numpy()
        guesses = guesses_by_score(scores, is_in, self.share)
        return guesses, epsilon, float(facts["val/accuracy"])
