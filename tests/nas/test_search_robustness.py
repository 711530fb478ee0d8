"""Searches that are killed, fed with NaN, or have the smallest clients that there are."""

import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch
from readme import ROOT
from test_one_shot import RESNET, one_shot
from test_one_shot import Source as Images
from test_one_shot import images as pictures
from test_search_trained import SHORT
from test_supernet import images, supernet
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData, toy_trainer, validating_trainer, weights

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.cli import main
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.data import NaturalPartition
from fl_lightning.nas import DeviceClasses, NASBench201, Reward, SinglePath
from fl_lightning.sparsity import SparseSGDM

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
ROUNDS = 5
CONFIGS = {"supernet": "quickstart.yaml", "one-shot": "one_shot_quickstart.yaml"}


def singles(number):
    """Images and labels in single precision."""
    x, labels = images(number).tensors
    return TensorDataset(x.float(), labels)


def owned(dataset, owners, **options):
    source = LoaderData(DataLoader(dataset, batch_size=4))
    return FederatedDataModule(source, partition=NaturalPartition(owners), seed=0, **options)


def fit(module, datamodule, rounds=1, **options):
    trainer = toy_trainer(Federation(**{"local_steps": 2} | options), max_epochs=rounds)
    trainer.fit(module, datamodule=datamodule)
    return module


# NaN


@pytest.mark.parametrize(
    ("half", "options", "steps"),
    [
        ("train", {}, 1),
        ("search", {}, 2),
        ("train", {"rule": SinglePath(), "learn": Reward()}, 2),
        ("search", {"rule": SinglePath(), "learn": Reward()}, 1),
    ],
)
def test_nan_in_a_clients_half_names_the_client(half, options, steps):
    dataset = singles(24)
    datamodule = owned(dataset, [i % 3 for i in range(24)], search_fraction=0.5)
    datamodule.setup("fit")
    shards = datamodule._roles.train if half == "train" else datamodule._roles.search
    dataset.tensors[0][shards[1]] = torch.nan
    with pytest.raises(ClientFailure, match="client 1"):
        fit(supernet(NASBench201(), **options), datamodule, local_steps=steps)


def test_nan_in_the_data_of_a_one_shot_network_names_the_client():
    dataset = pictures(24)
    dataset.tensors[0][2] = torch.nan
    with pytest.raises(ClientFailure, match="client 2"):
        fit(one_shot(RESNET), owned(dataset, [i % 3 for i in range(24)]))


# The smallest clients


def test_one_client_is_a_federation():
    module = fit(supernet(NASBench201()), owned(singles(8), [0] * 8, search_fraction=0.5))
    assert weights(module).isfinite().all()
    assert weights(fit(one_shot(RESNET), owned(pictures(8), [0] * 8))).isfinite().all()


def test_a_search_needs_two_examples_of_each_client():
    datamodule = owned(singles(8), [0, 0, 0, 0, 0, 0, 0, 1], search_fraction=0.5)
    with pytest.raises(ConfigurationError, match="client 1"):
        fit(supernet(NASBench201()), datamodule)
    two = owned(singles(8), [0, 0, 0, 0, 0, 0, 1, 1], search_fraction=0.5)
    assert weights(fit(supernet(NASBench201()), two)).isfinite().all()


@pytest.mark.parametrize("capability", [None, DeviceClasses([0.4, 1.0], seed=0)])
def test_clients_of_one_example_train_a_one_shot_network(capability):
    """Their statistics are left out, and what they send is finite."""
    optimizer = lambda p: SparseSGDM(p, lr=0.05)
    module = one_shot(RESNET, capability=capability, optimizer=optimizer)
    source = Images(DataLoader(pictures(12), batch_size=4))
    owners = [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 3]
    datamodule = FederatedDataModule(source, partition=NaturalPartition(owners), seed=0)
    trainer = validating_trainer(Federation(local_steps=2), max_epochs=2)
    trainer.fit(module, datamodule=datamodule)
    assert all(p.isfinite().all() for p in module.state_dict().values())
    assert "val/accuracy" in trainer.callback_metrics


# Killed


def command(kind, folder, *more):
    short = [word for word in SHORT if "max_epochs" not in word]
    return [
        *("fit", "--config", str(ROOT / "configs/nas" / CONFIGS[kind]), *short),
        *(f"--trainer.max_epochs={ROUNDS}", f"--trainer.logger.init_args.save_dir={folder}", *more),
    ]


def started(arguments):
    """The command line in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(arguments,))
    process.start()
    return process


def last(folder):
    [path] = Path(folder).rglob("last.ckpt")
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_killed_and_resumed_ends_in_the_same_bits(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    monkeypatch.chdir(tmp_path)
    killed = started(command(kind, "killed"))
    deadline = time.monotonic() + 240
    while not list(Path("killed").rglob("last.ckpt")):
        assert time.monotonic() < deadline
        assert killed.is_alive(), "it ended before its first checkpoint"
        time.sleep(0.01)
    time.sleep(0.3)  # into the next round
    killed.kill()
    killed.join()
    assert killed.exitcode == -9
    assert 1 <= last("killed")["global_step"] < ROUNDS
    for words in (command(kind, "whole"), command(kind, "killed", "--ckpt_path=last")):
        process = started(words)
        process.join()
        assert process.exitcode == 0
    whole, resumed = last("whole"), last("killed")
    assert whole["global_step"] == resumed["global_step"] == ROUNDS
    assert whole["state_dict"].keys() == resumed["state_dict"].keys()
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name
