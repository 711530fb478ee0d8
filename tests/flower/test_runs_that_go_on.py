"""Runs that go on: after a site's disk was full and there is room again, and for more rounds than planned."""

import pytest
from flower.site_processes import (
    OF_RUNS,
    Between,
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
SCAFFOLD = {"class_path": "fl_lightning.Scaffold"}
WRITTEN = ("memory.part", "answer.part")  # what a site writes in a round, see SiteMemory and Site
pytestmark = [pytest.mark.slow, *OF_RUNS]


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
