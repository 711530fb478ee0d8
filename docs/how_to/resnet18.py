"""torchvision's ResNet-18 over four clients; group norm has no statistics that clients must share."""

from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn import GroupNorm
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torchvision.models import resnet18

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import Arrays, DirichletPerClient

colours = torch.arange(120) % 3  # is an image red, green or blue?
images = 0.2 * torch.randn(120, 3, 16, 16) + torch.eye(3)[colours][:, :, None, None]


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
        return AdamW(self.parameters(), lr=1e-3)


seed_everything(0)
source = Arrays(images, colours, batch_size=8)  # or CIFAR10(download=True) of fl_lightning.data
data = FederatedDataModule(source, num_clients=4, partition=DirichletPerClient(alpha=100.0))
trainer = Trainer(max_epochs=4, callbacks=[Federation(local_epochs=1)])
trainer.fit(Classifier(), datamodule=data)
trainer.test(datamodule=data)
