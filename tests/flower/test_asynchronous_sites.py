"""Asynchronous rounds over sites: the order of arrival is on record, and simulated with it the bits agree."""

import csv
import sys

import pytest
from flower.site_processes import configuration, differing, over_network, simulated, three_sites
from flower.test_same_bits import SPARSE, built

FED_BUFF = {
    "federation__cohort": None,
    "federation__asynchronous": built("server.FedBuff", concurrency=4, buffer_size=2),
    "trainer__max_epochs": 6,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


def record(root):
    [file] = root.rglob("arrivals.csv")
    with file.open() as table:
        return file, list(csv.DictReader(table))


def replayed(config, root, file):
    """Simulate with the order of arrival that a run has written down."""
    return simulated(config, root, f"--federation.devices=RecordedArrivals", f"--federation.devices.file={file}")


def test_the_recorded_order_of_arrival_simulates_to_the_same_bits(tmp_path):
    config = configuration(**FED_BUFF, federation__updates=[SPARSE])
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    file, rows = record(tmp_path / "network")
    print(rows)
    assert len(rows) == 12
    alone = replayed(config, tmp_path / "alone", file)
    assert network["epoch"] == alone["epoch"] == 5
    assert differing(network, alone) == []
