"""A site whose disk is full: it says so, the run does without it or ends, and goes on when there is room."""

import sys

import pytest
from flower.site_processes import (
    configuration,
    differing,
    last,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import SPARSE

from fl_lightning.core.errors import ClientFailure
from fl_lightning.flower.messages import Order

ROUNDS = 4
WRITTEN = ("memory.part", "answer.part")  # what a site writes in a round, see SiteMemory and Site
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


class Full:
    """A channel that has site b's disk be full in round 1, as the system's own full device is."""

    def __init__(self, sites, name):
        self._channel, self._folder, self._name = sites.channel(), sites.folder / "b", name
        self.asked = 0

    def sites(self):
        return self._channel.sites()

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        if site == "b" and order.kind == "train" and order.round == 1:
            self.asked += 1
            (self._folder / order.run / self._name).symlink_to("/dev/full")
        self._channel.send(site, message, ttl)

    def receive(self, seconds):
        return self._channel.receive(seconds)

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
