"""How good sub-networks get on digits: beside training alone, with and without capabilities."""

from functools import partial

import pytest
from lightning.pytorch import seed_everything
from test_one_shot import RESNET
from toys import validating_trainer

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.data import Digits
from fl_lightning.models import ImageClassifier, Schedule
from fl_lightning.nas import DeviceClasses, OneShot, Sandwich
from fl_lightning.sparsity import SparseSGDM

OPTIONS = {
    "num_classes": 10,
    "image_size": 8,
    "optimizer": partial(SparseSGDM, lr=0.1, momentum=0.9),
    "schedule": Schedule("cosine"),
}


def accuracies(module, rounds=40):
    seed_everything(0, verbose=False)
    data = FederatedDataModule(Digits(seed=0, batch_size=16), num_clients=10, seed=0)
    trainer = validating_trainer(
        Federation(local_steps=4, seed=0), max_epochs=rounds, check_val_every_n_epoch=rounds
    )
    trainer.fit(module, datamodule=data)
    values = {n: 100 * float(v) for n, v in trainer.callback_metrics.items() if "accuracy" in n}
    return {name.removeprefix("val/"): round(v, 1) for name, v in values.items() if "val/" in name}


def one_shot(**options):
    seed_everything(0, verbose=False)
    return OneShot(RESNET, Sandwich(2), in_channels=1, seed=0, **OPTIONS, **options)


@pytest.mark.slow
def test_the_largest_is_as_good_as_alone(capsys):
    seed_everything(0, verbose=False)
    network = RESNET.build(RESNET.largest, num_classes=10, in_channels=1)
    alone = accuracies(ImageClassifier(network, in_chans=1, **OPTIONS))
    together = accuracies(one_shot())
    three = DeviceClasses([0.25, 0.5, 1.0], [0.4, 0.3, 0.3], seed=0)
    able = accuracies(one_shot(capability=three))
    with capsys.disabled():
        print(f"\nalone {alone}\nall largest {together}\nthree capabilities {able}")
    assert together["accuracy"] >= alone["accuracy"] - 2
    assert able["accuracy"] >= 80
