"""The demo of a network: modules and data of the folder where it is typed, and nothing else written there."""

import tempfile

import pytest
import torch
import yaml

pytest.importorskip("flwr")

from fl_lightning.cli.network.demo import compared_demo, site_settings, written_to
from fl_lightning.flower.class_paths import DEFAULT, Refused, checked
from fl_lightning.flower.layers import shared_part

MODULE = """
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return ((self.layer(batch[0]) - batch[0].sum(1, keepdim=True)) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(LightningDataModule):
    def __init__(self, root: str):
        super().__init__()
        self.root = root

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.load(Path(self.root, "x.pt"))), batch_size=8, shuffle=True)
"""
MODEL = "port_of_mine.Line"
CONFIG = {
    "seed_everything": 0,
    "model": {"class_path": MODEL},
    "data": {
        "class_path": "fl_lightning.FederatedDataModule",
        "init_args": {
            "source": {"class_path": "port_of_mine.Points", "init_args": {"root": "data"}},
            "num_clients": 4,
            "partition": "IID",
        },
    },
    "federation": {"local_epochs": 1},
    "trainer": {
        "accelerator": "cpu",
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "runs"},
        },
    },
}


def test_sites_of_a_demo_allow_what_its_configuration_names_and_no_more():
    with pytest.raises(Refused, match=f"'{MODEL}' is not allowed"):
        checked(shared_part(CONFIG), DEFAULT)  # as every other network's site
    allowed = site_settings(CONFIG)["classes"]
    assert allowed == [MODEL]
    assert checked(shared_part(CONFIG), [*DEFAULT, *allowed])["model"] == CONFIG["model"]
    other = {"model": {"class_path": "port_of_mine.Other"}}
    with pytest.raises(Refused, match=r"port_of_mine\.Other"):
        checked(other, [*DEFAULT, *allowed])


def test_a_place_on_a_sites_disk_is_refused_before_anything_starts():
    model = {"class_path": MODEL, "init_args": {"weights": "first.pt"}}
    with pytest.raises(Refused, match="path or an internet address"):
        site_settings(CONFIG | {"model": model})


def test_loggers_of_a_demo_write_below_its_folder_and_data_stay(tmp_path):
    written = yaml.safe_load(written_to(tmp_path, CONFIG))
    assert written["trainer"]["logger"]["init_args"] == {"save_dir": str(tmp_path / "runs")}
    assert written["data"] == CONFIG["data"]
    assert CONFIG["trainer"]["logger"]["init_args"] == {"save_dir": "runs"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "port_of_mine.py").write_text(MODULE)
    (tmp_path / "data").mkdir()
    torch.save(torch.arange(128.0).reshape(32, 4) / 128, tmp_path / "data" / "x.pt")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # sockets allow about a hundred bytes
    return tmp_path


@pytest.mark.slow
def test_a_module_in_the_current_folder_trains_over_a_network(folder):
    said, before = [], {path.name for path in folder.iterdir()}
    compared_demo(["--config=mine.yaml"], ["a", "b"], 1, said.append)
    assert said[-1] == "bit-identical to the simulation; all files are removed"
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before
