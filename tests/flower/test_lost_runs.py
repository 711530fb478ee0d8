"""Programs of a network that are killed or suspended: the run goes on by itself, to the same bits."""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower.site_processes import configuration

from fl_lightning.cli.over_network.compared_demo import compared_demo

ROUNDS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # sockets allow about a hundred bytes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    given = {"trainer__max_epochs": ROUNDS, "trainer__enable_progress_bar": True}
    Path("run.yaml").write_text(configuration(**given))


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
    assert "It goes on from its last whole round" in lost[0]
    assert saying.said[-1] == "same bits as the simulation; all files are removed"
    assert sum("| round 1/" in line for line in saying.said) == 1
