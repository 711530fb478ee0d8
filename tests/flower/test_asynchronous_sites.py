"""Asynchronous rounds over sites: the order of arrival is on record, and simulated with it the bits agree."""

import csv
import multiprocessing
import random
import sys
import time

import pytest
from flower.site_processes import (
    CLIENTS,
    configuration,
    differing,
    last,
    over_network,
    simulated,
    three_sites,
)
from flower.test_random_kills import Server
from flower.test_same_bits import HELD_OUT, PERSONAL, SPARSE, built

from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.flower.messages import Answer, Order

ROUNDS = 6
UNEQUAL = built("client.Devices", speeds=built("client.LogNormalSpeeds", sigma=0.7))
FED_BUFF = {
    "federation__cohort": None,
    "federation__asynchronous": built("server.FedBuff", concurrency=4, buffer_size=2),
    "federation__devices": UNEQUAL,
    "trainer__max_epochs": ROUNDS,
}
FED_ASYNC = FED_BUFF | {"federation__asynchronous": built("server.FedAsync", concurrency=3)}
WITH_MEMORY = FED_BUFF | {"federation__updates": [SPARSE]}
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
    recorded = ["--federation.devices=RecordedArrivals", f"--federation.devices.file={file}"]
    return simulated(config, root, *recorded)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(WITH_MEMORY, id="FedBuff, top-k with feedback"),
        pytest.param(FED_ASYNC, id="FedAsync", marks=pytest.mark.slow),
        pytest.param(
            FED_BUFF | PERSONAL, id="FedBuff, personal head", marks=pytest.mark.slow
        ),
    ],
)
def test_the_recorded_order_of_arrival_simulates_to_the_same_bits(options, tmp_path):
    config = configuration(**options)
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    file, rows = record(tmp_path / "network")
    step = options["federation__asynchronous"]["init_args"].get("buffer_size", 1)
    assert [int(row["round"]) for row in rows] == [at // step for at in range(ROUNDS * step)]
    assert any(row["version"] < row["round"] for row in rows)  # some are late
    alone = replayed(config, tmp_path / "alone", file)
    assert network["epoch"] == alone["epoch"] == ROUNDS - 1
    assert differing(network, alone) == []
