"""Programs of a network that are killed or suspended: the run goes on by itself, to the same bits."""

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower.site_processes import configuration

from fl_lightning.cli.network.demo import compared_demo

ROUNDS, KILLS = 4, 20
GIVEN = {"trainer__max_epochs": ROUNDS, "trainer__enable_progress_bar": True}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # sockets allow about a hundred bytes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    Path("run.yaml").write_text(configuration(**GIVEN))


def programs(word):
    """Return the process ids of this test's programs with a word in their commands."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and word in command:
            found.append(int(path.name))
    return found


class Saying:
    """Keeps what is said, and does something to a program at the end of some rounds.

    Args:
        acts: by round, to be done once.
    """

    def __init__(self, acts):
        self.said, self._acts = [], dict(acts)

    def __call__(self, line):
        print(line)
        self.said.append(line)
        for number in list(self._acts):
            if f"| round {number}/" in line:
                self._acts.pop(number)()


def kill(word):
    for pid in programs(word):
        os.kill(pid, signal.SIGKILL)


def suspend(seconds):
    """Suspend Flower's server, as a laptop's lid does."""
    [pid] = programs("flower-superlink")
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, [pid, signal.SIGCONT]).start()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: kill("flower-superexec"), "superexec ended with code -9"),
        (lambda: suspend(90), "No heartbeat received"),
    ],
    ids=["superexec killed", "server suspended"],
)
def test_a_lost_run_goes_on_by_itself_to_the_same_bits(act, reason):
    saying = Saying({2: act})
    compared_demo(["--config=run.yaml"], ["a", "b"], ROUNDS, saying)
    lost = [line for line in saying.said if line.startswith("the run was lost")]
    assert len(lost) == 1
    assert reason in lost[0]
    assert "the run starts again from its last completed round" in lost[0]
    assert saying.said[-1] == "bit-identical to the simulation; all files are removed"
    assert sum("| round 1/" in line for line in saying.said) == 1


@pytest.mark.parametrize(
    ("secure", "last"),
    [
        (True, "not compared: secure_noise gives every run its own noise;"),
        (False, "bit-identical to"),
    ],
)
def test_a_demo_with_noise_is_compared_where_the_noise_can_be_drawn_again(secure, last):
    """It failed with "the weights differ from the simulation's", whichever noise was drawn."""
    noise = {"clip_norm": 0.5, "noise_multiplier": 3.0, "secure_noise": secure}
    given = {
        "federation__privacy": {"class_path": "fl_lightning.LocalDP", "init_args": noise},
        "federation__aggregator": {
            "class_path": "fl_lightning.Mean",
            "init_args": {"weight_by_examples": False},
        },
    }
    Path("run.yaml").write_text(configuration(**GIVEN | given))
    saying = Saying({})
    compared_demo(["--config=run.yaml"], ["a", "b"], 1, saying)
    assert re.match(last, saying.said[-1])


# of the server, its app, of a site, and its app; a program that is forked has its parent's command
PROGRAMS = (
    *("flower-superlink", "network.gate", "flower-superexec", "flwr-serverapp"),
    *("flower-supernode", "transport.resident", "network.site_app"),
)


def test_nobody_is_left_of_twenty_kills_and_the_run_ends_in_the_same_bits(monkeypatch):
    """And of a minute in which the server was suspended."""
    monkeypatch.setenv("FL_LIGHTNING_TEST", mark := os.urandom(8).hex())
    rounds, draws = KILLS + 3, random.Random(KILLS)
    Path("run.yaml").write_text(configuration(**GIVEN | {"trainer__max_epochs": rounds}))
    words = [*PROGRAMS, *PROGRAMS, *draws.choices(PROGRAMS, k=KILLS - 2 * len(PROGRAMS))]
    draws.shuffle(words)
    killed = []

    def kill_one(word):
        found = [pid for pid in marked(mark) if word in command_of(pid)]
        if found:  # else it is about to be started again
            os.kill(draws.choice(found), signal.SIGKILL)
            print(f"killed {word}")
            killed.append(word)

    acts = [partial(kill_one, word) for word in words]
    acts.insert(KILLS // 2, partial(suspend, 60))
    saying = Saying(dict(enumerate(acts, 1)))
    compared_demo(["--config=run.yaml"], ["a", "b"], rounds, saying)
    until = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
    assert len(killed) >= KILLS - 2
    assert set(killed) == set(PROGRAMS)
    assert saying.said[-1] == "bit-identical to the simulation; all files are removed"


def command_of(pid):
    """Return a process's command, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def marked(word):
    """Return the processes besides this one that have a word in the environment of their start."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word in path.read_text(errors="replace") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
