"""Runs of the command line that are stopped by signals, and who is left of them.

A run is forked from the tests' process, which has imported everything, as the leader of a session of its
own: who belongs to it can be counted when it has ended.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

from fl_lightning import ImageClassifier
from fl_lightning.cli import main

CONFIG = Path(__file__).with_name("small_run.yaml")
SECONDS = 5.0  # after which nobody may be left


class Run:
    """A fit in a session of its own.

    Args:
        folder: where it writes, with standard error in ``said.txt``.
        devices: how many processes train.
        rounds: how many there are.
        words: more of the command line.
    """

    def __init__(self, folder, devices, rounds, *words):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        options = [
            *("fit", "--config", str(CONFIG), "--trainer.devices", str(devices)),
            *("--trainer.max_epochs", str(rounds), "--trainer.logger", "false", *words),
        ]
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_command, args=(folder, options))
        self._process.start()
        self.pid = self._process.pid

    def wait_for_step(self, step, seconds=120):
        """Return when a checkpoint of this global step, or a later one, is there."""
        deadline = time.monotonic() + seconds
        while saved_step(self.folder) < step:
            assert self._process.is_alive(), self.said()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self, seconds=300.0):
        """Wait and return the exit code and how long it took until nobody was left."""
        began = time.monotonic()
        self._process.join(seconds)
        left = members(self.pid)
        while left and time.monotonic() - began < seconds:
            time.sleep(0.02)
            left = members(self.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes are left: {self.said()}"
        return self._process.exitcode, time.monotonic() - began

    def said(self):
        return (self.folder / "said.txt").read_text()


def _command(folder, options):
    os.setsid()
    os.chdir(folder)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest has put others there
    sys.argv = ["fl-lightning"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(options)


def members(session):
    """Return the processes of a session that live, the leader first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return sorted(found, key=lambda pid: (pid != session, pid))


def checkpoints(folder):
    return sorted(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def saved_step(folder):
    """Return after how many rounds the newest checkpoint below a folder was saved, 0 for none."""
    found = checkpoints(folder)
    return torch.load(found[-1], weights_only=True)["global_step"] if found else 0


def final_state(folder, rounds):
    """Return the weights at the end of a fit, which has left one folder and nothing unfinished."""
    (last,) = checkpoints(folder)
    assert not list(folder.rglob("*.unfinished"))
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == rounds
    return checkpoint["state_dict"]


def assert_same_bits(ours, expected):
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


class SlowClassifier(ImageClassifier):
    """Its rounds take much longer than Ctrl-C waits for."""

    def training_step(self, batch, batch_idx):
        Path("trains").touch()
        time.sleep(0.5)
        return super().training_step(batch, batch_idx)


class StoppedAtBirth(ImageClassifier):
    """The processes that are forked to train it get Ctrl-C before they have done anything."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
