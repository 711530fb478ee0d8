"""Rents from a table, over five cities whose rows stay where they are."""

import numpy as np
import pandas as pd
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn import Flatten, Linear, Sequential
from torch.nn.functional import l1_loss, mse_loss
from torch.optim import SGD

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import FederatedNormalize, NaturalPartition, Table

rng = np.random.default_rng(0)
flats = pd.DataFrame({"area": rng.uniform(20, 120, 500), "view": rng.choice(["sea", "yard"], 500)})
flats["city"] = rng.choice(["Bari", "Como", "Lodi", "Pisa", "Roma"], 500)
flats["rent"] = flats["area"] / 30 + (flats["view"] == "sea") + rng.normal(0, 0.1, 500)


class Rents(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Sequential(Linear(3, 1), Flatten(0))

    def training_step(self, batch, batch_idx):
        return mse_loss(self.network(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test/mae", l1_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


seed_everything(0)
source = Table(flats, "rent", ignore=["city"])  # or a file: Table("flats.parquet", "rent")
cities, scaled = NaturalPartition("city"), [FederatedNormalize()]
data = FederatedDataModule(source, partition=cities, transforms=scaled)
trainer = Trainer(max_epochs=20, callbacks=[Federation(local_epochs=1)])
trainer.fit(Rents(), datamodule=data)
trainer.test(datamodule=data)
