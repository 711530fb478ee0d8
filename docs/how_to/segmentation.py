"""Which pixels are bright: batches are dicts of images and masks, from a data set of your own."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch.nn import Conv2d, ReLU, Sequential
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import AdamW
from torch.utils.data import Dataset

from fl_lightning import FederatedDataModule, Federation


class Spots(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        image = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(index))
        return {"image": image, "mask": (image > 0.5).float()}


class Segmenter(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Sequential(Conv2d(1, 8, 3, padding=1), ReLU(), Conv2d(8, 1, 1))

    def training_step(self, batch, batch_idx):
        return binary_cross_entropy_with_logits(self.network(batch["image"]), batch["mask"])

    def test_step(self, batch, batch_idx):
        right = (self.network(batch["image"]) > 0) == batch["mask"].bool()
        self.log("test/pixels", right.float().mean())

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=0.05)


seed_everything(0)
source = LightningDataModule.from_datasets(Spots(), test_dataset=Spots(), batch_size=5)
trainer = Trainer(max_epochs=10, callbacks=[Federation(local_epochs=3)])
trainer.fit(Segmenter(), datamodule=FederatedDataModule(source, num_clients=10))
trainer.test(datamodule=source)
