"""What fine-tuning keeps of an earlier task: the module's own metrics, counted again by hand."""

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    ConfigurationError,
    FederatedDataModule,
    Federation,
    ImageClassifier,
    Retention,
)
from fl_lightning.data import IID, Digits

OLD, NEW = [0, 1, 2], [3, 4, 5]


def classifier():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
    )
    return ImageClassifier(
        network, num_classes=10, in_chans=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )


def fit(*callbacks, devices=1):
    seed_everything(0, verbose=False)
    new = FederatedDataModule(Digits(classes=NEW, seed=0), num_clients=3, partition=IID(), seed=0)
    federation = Federation(local_epochs=1, seed=0)
    trainer = validating_trainer(*callbacks, federation, max_epochs=2, devices=devices)
    module = classifier()
    trainer.fit(module, datamodule=new)
    return module, trainer, new


def accuracy(module, loader):
    module.eval()
    with torch.no_grad():
        right = torch.cat([module(images).argmax(1) == labels for images, labels in loader])
    return float(right.float().mean())


def test_it_is_counted_by_hand_and_changes_nothing():
    old = Digits(classes=OLD, seed=0, batch_size=7)
    module, trainer, new = fit(Retention(old))
    alone, plain, _ = fit()
    assert torch.equal(weights(module), weights(alone))
    assert float(trainer.callback_metrics["val/accuracy"]) == float(
        plain.callback_metrics["val/accuracy"]
    )
    kept = float(trainer.callback_metrics["retention/val/accuracy"])
    assert kept == pytest.approx(accuracy(module, old.val_dataloader()))
    assert kept != float(trainer.callback_metrics["val/accuracy"])
    trainer.test(module, datamodule=new, verbose=False)
    found = float(trainer.callback_metrics["retention/test/accuracy"])
    assert found == pytest.approx(accuracy(module, old.test_dataloader()))
    assert float(trainer.callback_metrics["test/accuracy"]) == pytest.approx(
        accuracy(module, new.test_dataloader())
    )


def test_the_limits_of_batches_hold_for_the_earlier_task_and_one_without_examples_is_refused():
    old = Digits(classes=OLD, seed=0, batch_size=7)
    trainer = validating_trainer(Retention(old), limit_val_batches=2)
    module = classifier()
    trainer.validate(module, Digits(classes=NEW, seed=0), verbose=False)
    kept = float(trainer.callback_metrics["retention/val/accuracy"])
    assert kept == pytest.approx(accuracy(module, [*old.val_dataloader()][:2]))
    assert kept != pytest.approx(accuracy(module, old.val_dataloader()))
    trainer = validating_trainer(Retention(Digits(val_fraction=0.0)), max_epochs=1)
    with pytest.raises(ConfigurationError, match="one DataLoader for validation, got"):
        trainer.fit(ToyModule(), datamodule=toy_data())


def test_two_processes_say_the_same():
    old = Digits(classes=OLD, seed=0)
    alone, together = (fit(Retention(old), devices=n)[1].callback_metrics for n in (1, 2))
    name = "retention/val/accuracy"
    assert float(together[name]) == pytest.approx(float(alone[name]), abs=0.01)
