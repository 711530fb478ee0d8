"""Asynchronous rounds over sites: the order of arrival is on record, and simulated with it the bits agree."""

import csv
import random
import time

import pytest
from flower.site_processes import (
    CLIENTS,
    OF_RUNS,
    Between,
    configuration,
    differing,
    last,
    over_network,
    simulated,
    three_sites,
)
from flower.test_runs_that_go_on import train_with_kills
from flower.test_same_bits import HELD_OUT, MASKED, PERSONAL, SPARSE, built

from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.client.clocks import VirtualClock
from fl_lightning.client.devices import Fleet
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.federation.stages.asynchrony import Arrivals
from fl_lightning.flower.messages import Answer, Order, digest

ROUNDS = 6
UNEQUAL = built("client.Devices", speeds=built("client.LogNormalSpeeds", sigma=0.7), jitter=0.1)
FED_BUFF = {
    "federation__cohort": None,
    "federation__asynchronous": built("server.FedBuff", concurrency=4, buffer_size=2),
    "federation__devices": UNEQUAL,
    "trainer__max_epochs": ROUNDS,
}
FED_ASYNC = FED_BUFF | {"federation__asynchronous": built("server.FedAsync", concurrency=3)}
WITH_MEMORY = FED_BUFF | {"federation__updates": [SPARSE]}
pytestmark = OF_RUNS


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
        pytest.param(WITH_MEMORY, id="FedBuff, top-k with feedback", marks=pytest.mark.slow),
        pytest.param(
            FED_ASYNC | {"model__init_args__schedule": {"kind": "cosine"}},
            id="FedAsync, a schedule of rates",
            marks=pytest.mark.slow,
        ),
        pytest.param(FED_BUFF | PERSONAL, id="FedBuff, personal head", marks=pytest.mark.slow),
        pytest.param(FED_BUFF | MASKED, id="FedBuff, calibrated mask", marks=pytest.mark.slow),
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


class Noting(VirtualClock):
    """Virtual time that notes who ended."""

    def __init__(self, result_of):
        super().__init__(result_of)
        self.order = []

    def wait(self):
        ended = super().wait()
        self.order += ended
        return ended


def virtual_order(num_clients, num_steps, concurrency, buffer_size):
    """Who arrives when in the simulation of these tests, and with which version."""
    fleet = Fleet(Devices(speeds=LogNormalSpeeds(sigma=0.7), jitter=0.1), num_clients, seed=0)
    clock = Noting(lambda client, start: fleet.result(client, num_steps, draw=start))
    Arrivals(clock, num_clients, concurrency, buffer_size, seed=0).step(ROUNDS - 1)
    return [(ended.client, ended.version) for ended in clock.order]


class InOrder(Between):
    """A channel that hands answers on in a given order, whenever they come."""

    def __init__(self, sites, order):
        super().__init__(sites)
        self._order, self._held, self._sent = list(order), {}, {}

    def send(self, site, message, ttl):
        self._sent[digest(message)] = Order.from_bytes(message, limit=2**30)
        super().send(site, message, ttl)

    def receive(self, seconds):
        passed = []
        for site, came in self._channel.receive(seconds):
            answer = Answer.from_bytes(came, limit=2**30)
            order = self._sent[answer.order]
            if order.kind == "train":
                [client] = answer.clients
                self._held[client.client, order.round] = site, came
            else:
                passed.append((site, came))
        while self._order and self._order[0] in self._held:
            passed.append(self._held.pop(self._order.pop(0)))
        return passed


def test_answers_in_the_order_of_virtual_time_end_in_the_simulations_bits(tmp_path):
    config = configuration(
        **WITH_MEMORY
        | {
            "data__init_args__num_clients": 4,
            "federation__asynchronous": built("server.FedBuff", concurrency=3, buffer_size=2),
            "federation__local_epochs": None,
            "federation__local_steps": 3,
        }
    )
    order = virtual_order(4, num_steps=3, concurrency=3, buffer_size=2)
    with three_sites(config, {name: (at,) for at, name in enumerate("abcd")}) as sites:
        channel = InOrder(sites, order)
        network = over_network(sites, config, tmp_path / "network", channel=channel)
    _, rows = record(tmp_path / "network")
    assert [(int(row["client"]), int(row["version"])) for row in rows] == order
    assert any(row["version"] < row["round"] for row in rows)
    assert differing(network, simulated(config, tmp_path / "alone")) == []


@pytest.mark.slow
def test_clients_are_evaluated_while_they_are_at_work(tmp_path):
    config = configuration(**HELD_OUT | FED_BUFF | PERSONAL)
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    file, _ = record(tmp_path / "network")
    assert differing(network, replayed(config, tmp_path / "alone", file)) == []
    for stage in ("validation", "test"):
        [there] = (tmp_path / "network").rglob(f"clients_{stage}.csv")
        [here] = (tmp_path / "alone").rglob(f"clients_{stage}.csv")
        assert there.read_text() == here.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_kills_end_in_the_bits_of_what_is_on_record(seed, tmp_path):
    """Server and sites die; what was in flight is asked again, and each update counts once, as recorded."""
    rounds, draws = 40, random.Random(seed)
    config = configuration(**WITH_MEMORY | {"trainer__max_epochs": rounds})
    victims = ["server", draws.choice([*CLIENTS]), draws.choice([*CLIENTS, "server"])]
    pauses = (draws.uniform(*ends) for ends in ((6, 10), (2, 6), (2, 6), (0, 0)))
    with three_sites(config) as sites:
        assert train_with_kills(sites, config, tmp_path / "network", victims, pauses)
    network = last(tmp_path / "network")
    assert network["epoch"] == rounds - 1
    file, rows = record(tmp_path / "network")
    arrived = [(row["client"], row["version"]) for row in rows if row["lost"] == "0"]
    assert len(arrived) == len(set(arrived)) == 2 * rounds
    assert differing(network, replayed(config, tmp_path / "alone", file)) == []


class Dying(Between):
    """A channel on which a site dies for good with its second order, and answers take their time."""

    def __init__(self, sites, victims, pause=0.0):
        super().__init__(sites)
        self._victims, self._pause = victims, pause
        self._asked = dict.fromkeys(victims, 0)

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        if site in self._victims and order.kind == "train":
            self._asked[site] += 1
            if self._asked[site] == 2:
                self._sites.kill(site)
        self._channel.send(site, message, ttl)

    def receive(self, seconds):
        came = self._channel.receive(seconds)
        time.sleep(self._pause * len(came))
        return came


@pytest.mark.slow
def test_a_site_that_is_gone_holds_up_its_own_clients_only(tmp_path):
    skip = {"federation__on_client_failure": "skip", "trainer__max_epochs": 20}
    config = configuration(**FED_BUFF | skip)
    with three_sites(config) as sites:
        channel = Dying(sites, ["c"], pause=0.7)
        network = over_network(sites, config, tmp_path / "network", channel=channel, deadline=15.0)
    file, rows = record(tmp_path / "network")
    assert {int(row["client"]) for row in rows if row["lost"] == "1"} <= {4, 5}
    assert any(row["lost"] == "1" for row in rows)
    assert sum(row["lost"] == "0" for row in rows) == 40
    assert differing(network, replayed(config, tmp_path / "alone", file)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("raise", ClientFailure, r"client \d: at site .: it did not answer within 15 s"),
        ("skip", RoundFailure, r"\d orders in a row had no answer"),
    ],
)
def test_without_any_site_the_run_fails(failure, error, message, tmp_path):
    config = configuration(**FED_BUFF, federation__on_client_failure=failure)
    with three_sites(config) as sites:
        channel = Dying(sites, [*CLIENTS])
        with pytest.raises(error, match=message):
            over_network(sites, config, tmp_path / "network", channel=channel, deadline=15.0)


def test_a_record_is_no_way_to_be_fast(tmp_path):
    (tmp_path / "arrivals.csv").write_text("round,client,version,seconds,lost\n")
    recorded = built("client.RecordedArrivals", file=str(tmp_path / "arrivals.csv"))
    config = configuration(**FED_BUFF | {"federation__devices": recorded})
    with (
        three_sites(config, {}) as sites,
        pytest.raises(ConfigurationError, match="RecordedArrivals replays an earlier run"),
    ):
        over_network(sites, config, tmp_path / "network")
