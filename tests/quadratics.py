"""Two clients with a quadratic each, whose federated runs are known in closed form."""

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset
from toys import toy_trainer

from fl_lightning import Federation, Mean
from fl_lightning.data import FederatedDataModule


class Quadratic(LightningModule):
    """a (x - c)² / 2 with one weight x."""

    def __init__(self, optimizer=torch.optim.SGD, lr=0.1, start=0.0, **options):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.make_optimizer = lambda: optimizer(self.parameters(), lr=lr, **options)

    def training_step(self, batch, batch_idx):
        a, c, _ = batch
        return (0.5 * a * (self.x - c) ** 2).mean()

    def configure_optimizers(self):
        return self.make_optimizer()


class TwoQuadratics(LightningDataModule):
    """One client's is x²/2, the other's 2 (x - 10)², each as many times as it takes local steps."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def train_dataloader(self):
        a = torch.tensor([1.0] * self.copies[0] + [4.0] * self.copies[1], dtype=torch.float64)
        c = torch.where(a == 1, 0.0, 10.0).double()
        return DataLoader(TensorDataset(a, c, (a == 4).long()), batch_size=1)


class ByOwner:
    """A partition for tests: the label is the owner."""

    def assign(self, labels, num_clients, seed):
        return [np.flatnonzero(labels == k) for k in range(num_clients)]


class Positions(Callback):
    """Keeps x after every round."""

    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, module):
        self.values.append(module.x.item())


def trajectory(copies, *, rounds=3, module=None, source=TwoQuadratics, **options):
    """Return x after every round, and the federation."""
    positions = Positions()
    settings = {"local_epochs": 1, "aggregator": Mean(weight_by_examples=False)}
    federation = Federation(**settings | options)
    data = FederatedDataModule(source(copies), num_clients=2, partition=ByOwner())
    trainer = toy_trainer(federation, positions, max_epochs=rounds, precision="64-true")
    trainer.fit(module or Quadratic(), datamodule=data)
    return positions.values, federation
