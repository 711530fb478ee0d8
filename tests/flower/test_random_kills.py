"""Sites and servers that die at any moment: the run goes on, and ends in the bits of the undisturbed one."""

import multiprocessing
import random
import time

import pytest
from flower.site_processes import (
    CLIENTS,
    OF_RUNS,
    configuration,
    farthest,
    last,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import KEPT

ROUNDS, KILLS, MOST_SECONDS = 60, 3, 300
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


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("seed", range(5))
def test_any_kills_end_in_the_same_bits(kept, seed, tmp_path, monkeypatch):
    draws = random.Random(f"{kept} {seed}")
    config = configuration(trainer__max_epochs=ROUNDS, **KEPT[kept])
    victims = [draws.choice([*CLIENTS, "server"]) for _ in range(KILLS)]
    killed, until = 0, time.monotonic() + MOST_SECONDS
    with three_sites(config) as sites:
        server = Server(sites, config, tmp_path / "network")
        due = time.monotonic() + draws.uniform(0.5, 4)
        while not server.is_done() and time.monotonic() < until:
            if killed < KILLS and time.monotonic() > due:
                if victims[killed] == "server":
                    server.kill()
                else:
                    sites.kill(victims[killed])
                    sites.start(victims[killed])
                killed, due = killed + 1, time.monotonic() + draws.uniform(0.2, 2)
            time.sleep(0.01)
        server.process.kill()
        server.process.join()
    network = last(tmp_path / "network")
    assert network["epoch"] == ROUNDS - 1
    assert killed == KILLS
    # sums that are encrypted have fresh noise in every round, which training makes larger
    most = 1e-5 if kept == "encrypted" else 0
    apart = farthest(network, simulated(config, tmp_path / "alone"))
    assert apart <= most
