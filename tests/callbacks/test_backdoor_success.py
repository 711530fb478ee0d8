"""How often triggered images are taken for the target: by hand, over batches, over processes."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from toys import validating_trainer

from fl_lightning import BackdoorSuccess, ConfigurationError, FederatedDataModule, Federation
from fl_lightning.data import Normalize
from fl_lightning.data.client_examples import Trigger
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.server.attacks import Scaling

TRIGGER = Trigger(target=2, size=2, value=3.0)


class Images(LightningDataModule):
    """Noise whose class is in the brightest row."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(180) % 3
        x = 0.3 * torch.randn(180, 1, 4, 4, generator=generator)
        x[torch.arange(180), 0, y] += 1.5
        self.data = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=10)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=7)  # the last one is smaller

    test_dataloader = val_dataloader


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 3)

    def forward(self, images):
        return self.layer(images.flatten(1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val/accuracy", accuracy, batch_size=len(batch[1]))

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit(devices=1, transforms=None, trigger=TRIGGER, **options):
    seed_everything(0, verbose=False)
    module = Linear()
    federation = Federation(local_epochs=2, seed=1, engine="sequential", **options)
    callbacks = federation, BackdoorSuccess(trigger)
    trainer = validating_trainer(*callbacks, max_epochs=4, devices=devices)
    data = FederatedDataModule(Images(), num_clients=9, transforms=transforms, seed=0)
    trainer.fit(module, datamodule=data)
    return module, trainer, data


def by_hand(module, data):
    """Return the fraction, and that of images without the trigger."""
    found = []
    for image, label in data.source.data:
        for transform in data.fitted_transforms:
            image = transform(image[None])[0]
        marked = image.clone()
        marked[0, 2:, 2:] = 3.0
        with torch.no_grad():
            taken = [int(module(x[None]).argmax()) == 2 for x in (marked, image)]
        if int(label) != 2:
            found.append(taken)
    return torch.tensor(found).double().mean(0).tolist()


BACKDOOR = Attackers(fraction=0.34, poison=TRIGGER, forge=Scaling(3.0))


def test_it_is_the_fraction_counted_one_by_one():
    module, trainer, data = fit(attackers=BACKDOOR, transforms=[Normalize([0.4], [0.5])])
    success, without = by_hand(module, data)
    assert float(trainer.callback_metrics["val/backdoor_success"]) == pytest.approx(success)
    assert min(success - 0.9, 0.3 - without) > 0  # the attackers learnt what is tested
    trainer.test(module, datamodule=data, verbose=False)
    assert float(trainer.callback_metrics["test/backdoor_success"]) == pytest.approx(success)


def test_two_processes_count_the_same_images():
    alone, together = (fit(devices=n, attackers=BACKDOOR)[1].callback_metrics for n in (1, 2))
    for name in ("val/backdoor_success", "val/accuracy"):
        assert float(together[name]) == pytest.approx(float(alone[name]), abs=0.01)


def test_refuses_what_it_cannot_count():
    success, images = BackdoorSuccess(TRIGGER), torch.zeros(3, 1, 4, 4)
    of_the_target_alone = images, torch.full((3,), 2)
    assert success.count(Linear(), of_the_target_alone).tolist() == [0, 0]
    with pytest.raises(ConfigurationError, match="batches of images and labels, got Tensor"):
        success.count(Linear(), images)
    with pytest.raises(ConfigurationError, match=r"from Flatten.forward\(images\)"):
        success.count(torch.nn.Flatten(0), (images, torch.zeros(3)))
