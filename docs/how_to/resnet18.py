"""torchvision's ResNet-18 over five clients; group norm has no statistics that clients must share."""

from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn import GroupNorm
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torchvision.models import resnet18

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import Arrays, DirichletPerClient

colours = torch.arange(150) % 3  # is an image red, green or blue?
images = torch.rand(150, 3, 16, 16) + torch.eye(3)[colours][:, :, None, None]


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = resnet18(num_classes=3, norm_layer=partial(GroupNorm, 8))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.network(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        right = self.network(batch[0]).argmax(1) == batch[1]
        self.log("test/accuracy", right.float().mean())

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.02)


seed_everything(0)
source = Arrays(images, colours, batch_size=8)  # or CIFAR10(download=True) of fl_lightning.data
partition = DirichletPerClient(alpha=1.0)
data = FederatedDataModule(source, num_clients=5, partition=partition)
trainer = Trainer(max_epochs=3, callbacks=[Federation(local_epochs=1)])
trainer.fit(Classifier(), datamodule=data)
trainer.test(datamodule=data)
