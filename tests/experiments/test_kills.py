"""Kills of ``compare`` and ``sweep``: nobody is left, and a folder has one writer."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from cli.stopping import members
from experiments.test_sweep import BASE, ROOT, SEARCH
from lightning.pytorch import Callback

from fl_lightning.cli import main
from fl_lightning.core.processes import sole_writer

SECONDS = 5.0  # after which nobody may be left


class LongRound(Callback):
    """Its third round takes longer than any test waits."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            Path(trainer.log_dir, "is_long").touch()
            time.sleep(60)


LONG = {
    **BASE,
    "trainer": {
        **BASE["trainer"],
        "callbacks": [{"class_path": "experiments.test_kills.LongRound"}],
    },
}
FILES = {
    "compare": {"base": LONG, "variants": {"a": None}, "seeds": "0,1"},
    "sweep": {**SEARCH, "base": LONG},
}
WORDS = {"compare": ["compare", "--config", "compare.yaml"], "sweep": ["sweep", "-s", "sweep.yaml"]}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    for command, content in FILES.items():
        Path(f"{command}.yaml").write_text(yaml.safe_dump(content))


@contextmanager
def started(command, out):
    """Start a command as the leader of a session; nobody of it is left after the test."""
    words = [sys.executable, "-m", "fl_lightning", *WORDS[command], "--out", str(out)]
    with Path(f"{out}.txt").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
    try:
        yield process
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_until(is_so, seconds):
    until = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def trains(out):
    """Return whether two runs are in the middle of a round."""
    return len(list(Path(out).rglob("is_long"))) == 2


def kill(process, signum):
    process.send_signal(signum)
    process.wait()
    left = []

    def is_alone():
        left[:] = members(process.pid)
        return not left

    assert wait_until(is_alone, SECONDS), f"{len(left)} processes are left"


@pytest.mark.parametrize(
    ("command", "signum"), [("compare", signal.SIGKILL), ("sweep", signal.SIGTERM)]
)
def test_runs_end_with_the_command_that_has_started_them(command, signum):
    with started(command, "out") as process:
        assert wait_until(lambda: trains("out"), 120), Path("out.txt").read_text()
        kill(process, signum)


def test_a_second_comparison_in_a_folder_is_refused(capsys):
    with sole_writer(Path("out", ".lock"), "wait"), pytest.raises(SystemExit) as ended:
        main([*WORDS["compare"], "--out", "out"])
    said = " ".join(f"{ended.value} {capsys.readouterr().err}".split())
    assert f"out: process {os.getpid()} writes into this folder: wait for its end" in said
    assert [path.name for path in Path("out").rglob("*")] == [".lock"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_nobody_is_left_of_ten_kills_at_any_moment(command):
    draws = random.Random(command)
    for number in range(10):
        with started(command, f"out_{number}") as process:
            time.sleep(draws.uniform(0, 15))
            kill(process, draws.choice([signal.SIGTERM, signal.SIGKILL]))
