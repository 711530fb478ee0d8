"""Flower's quickstart-pytorch-lightning: an autoencoder of MNIST, 2 of 4 clients a round."""

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from fl_lightning import ClientEvaluation, FederatedDataModule, Federation, UniformCohort
from fl_lightning.data import IID


class AutoEncoder(LightningModule):  # no get_parameters, no set_parameters
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def loss(self, batch):
        pixels = batch[0].flatten(start_dim=1)
        return functional.mse_loss(self.decoder(self.encoder(pixels)), pixels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


class Digits(LightningDataModule):  # all of them: the partition is not its business
    def train_dataloader(self):
        images = MNIST("data", train=True, download=True, transform=ToTensor())
        return DataLoader(images, batch_size=32, shuffle=True)

    def test_dataloader(self):
        images = MNIST("data", train=False, download=True, transform=ToTensor())
        return DataLoader(images, batch_size=32)


seed_everything(0)
data = FederatedDataModule(
    Digits(), num_clients=4, partition=IID(), client_val_fraction=0.2, client_test_fraction=0.2
)
federation = Federation(cohort=UniformCohort(fraction=0.5), local_epochs=1)
callbacks = [federation, ClientEvaluation(every_n_rounds=1)]
trainer = Trainer(max_epochs=3, callbacks=callbacks, accelerator="cpu", enable_checkpointing=False)
model = AutoEncoder()
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data)
