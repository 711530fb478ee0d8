"""Runs that go on: after kills at any moment, after a full disk, and for more rounds than planned."""

import multiprocessing
import random
import time

import pytest
from flower.site_processes import (
    CLIENTS,
    OF_RUNS,
    Between,
    configuration,
    differing,
    farthest,
    last,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import KEPT, SPARSE

from fl_lightning.core.errors import ClientFailure
from fl_lightning.flower.messages import Order

ROUNDS = 4
SCAFFOLD = {"class_path": "fl_lightning.Scaffold"}
WRITTEN = ("memory.part", "answer.part")  # what a site writes in a round, see SiteMemory and Site
pytestmark = [pytest.mark.slow, *OF_RUNS]


class Server:
    """The server's process; started again, it goes on from its last checkpoint."""

    def __init__(self, sites, config, root):
        self._given, self._root = (sites, config, root), root
        self.start()

    def start(self):
        words = [f"--ckpt_path={file}" for file in self._root.rglob("last.ckpt")]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=over_network, args=[*self._given, *words])
        self.process.start()

    def kill(self):
        self.process.kill()
        self.process.join()
        self.start()

    def is_done(self):
        """Return whether the run is over; one that has failed goes on."""
        if self.process.exitcode not in (None, 0):
            self.start()
        return self.process.exitcode == 0


def train_with_kills(sites, config, root, victims, pauses):
    """Train while the server or sites are killed, each after a pause in seconds; return whether all were."""
    server, until = Server(sites, config, root), time.monotonic() + 400
    left, due = list(victims), time.monotonic() + next(pauses)
    while not server.is_done() and time.monotonic() < until:
        if left and time.monotonic() > due:
            if (victim := left.pop(0)) == "server":
                server.kill()
            else:
                sites.kill(victim)
                sites.start(victim)
            due = time.monotonic() + next(pauses)
        time.sleep(0.01)
    server.process.kill()
    server.process.join()
    return not left


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("seed", range(5))
def test_any_kills_end_in_the_same_bits(kept, seed, tmp_path):
    draws = random.Random(f"{kept} {seed}")
    config = configuration(trainer__max_epochs=60, **KEPT[kept])
    victims = draws.choices([*CLIENTS, "server"], k=3)
    pauses = (draws.uniform(*ends) for ends in ((0.5, 4), (0.2, 2), (0.2, 2), (0, 0)))
    with three_sites(config) as sites:
        assert train_with_kills(sites, config, tmp_path / "network", victims, pauses)
    network = last(tmp_path / "network")
    assert network["epoch"] == 59
    # sums that are encrypted have fresh noise in every round, which training makes larger
    most = 1e-5 if kept == "encrypted" else 0
    assert farthest(network, simulated(config, tmp_path / "alone")) <= most


class Full(Between):
    """A channel that has site b's disk be full in round 1, as the system's own full device is."""

    def __init__(self, sites, name):
        super().__init__(sites)
        self._folder, self._name = sites.folder / "b", name
        self.asked = 0

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        if site == "b" and order.kind == "train" and order.round == 1:
            self.asked += 1
            (self._folder / order.run / self._name).symlink_to("/dev/full")
        self._channel.send(site, message, ttl)

    def make_room(self):
        [link] = self._folder.rglob(self._name)
        link.unlink()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_that_a_full_disk_has_ended_goes_on_to_the_same_bits(name, tmp_path):
    config = configuration(trainer__max_epochs=ROUNDS, federation__updates=[SPARSE])
    with three_sites(config) as sites:
        channel = Full(sites, name)
        said = (
            r"client \d: at site b: the site's disk is full or cannot be written to; the site's log"
        )
        with pytest.raises(ClientFailure, match=said):
            over_network(sites, config, tmp_path / "network", channel=channel)
        assert "No space left on device" in (sites.folder / "b.log").read_text()
        channel.make_room()
        [file] = (tmp_path / "network").rglob("last.ckpt")
        network = over_network(sites, config, tmp_path / "network", f"--ckpt_path={file}")
    assert network["epoch"] == ROUNDS - 1
    assert differing(network, simulated(config, tmp_path / "alone")) == []


def test_others_go_on_without_a_site_whose_disk_is_full(tmp_path):
    config = configuration(
        trainer__max_epochs=ROUNDS,
        federation__updates=[SPARSE],
        federation__on_client_failure="skip",
        federation__cohort={"class_path": "fl_lightning.AllClients"},
    )
    with three_sites(config) as sites:
        over_network(sites, config, tmp_path, channel=Full(sites, "memory.part"))
        log = (sites.folder / "b.log").read_text()
    assert last(tmp_path)["epoch"] == ROUNDS - 1
    assert "No space left on device" in log


def test_a_run_that_is_over_goes_on_for_more_rounds(tmp_path):
    given = {"federation__updates": [SPARSE], "federation__correction": SCAFFOLD}
    config = configuration(trainer__max_epochs=2, **given)
    longer = configuration(trainer__max_epochs=ROUNDS, **given)
    with three_sites(config) as sites:
        over_network(sites, config, tmp_path / "network")
        [file] = (tmp_path / "network").rglob("last.ckpt")
        network = over_network(sites, longer, tmp_path / "network", f"--ckpt_path={file}")
    assert network["epoch"] == ROUNDS - 1
    assert differing(network, simulated(longer, tmp_path / "alone")) == []


def test_a_round_that_was_answered_is_not_answered_to_another_configuration(tmp_path):
    """As when the server was killed within a round, and goes on with other options."""
    config = configuration(trainer__max_epochs=2)
    other = configuration(trainer__max_epochs=ROUNDS)
    first = tmp_path / "first.ckpt"

    class Copying(Full):
        """Keeps the checkpoint after the first round."""

        def send(self, site, message, ttl):
            if not first.exists() and Order.from_bytes(message, limit=2**30).round == 1:
                [file] = (tmp_path / "network").rglob("last.ckpt")
                first.write_bytes(file.read_bytes())
            self._channel.send(site, message, ttl)

    with three_sites(config) as sites:
        over_network(sites, config, tmp_path / "network", channel=Copying(sites, ""))
        said = r"has answered this round, or a later one, .* with the same configuration"
        with pytest.raises(ClientFailure, match=said):
            over_network(sites, other, tmp_path / "network", f"--ckpt_path={first}")
