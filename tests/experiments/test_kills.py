"""Kills of ``compare`` and ``sweep``: nobody is left, and a folder has one writer."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from cli.stopping import members
from experiments.test_sweep import BASE, SEARCH
from lightning.pytorch import Callback

from fl_lightning.cli import main
from fl_lightning.core.processes import sole_writer

SECONDS = 5.0  # after which nobody may be left
KILLS = 10
SIGNALS = signal.SIGTERM, signal.SIGKILL


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
SLOW = {  # whose rounds last long enough to be killed in
    **BASE,
    "trainer": {
        **BASE["trainer"],
        "max_epochs": 8,
        "callbacks": [{"class_path": "experiments.test_sweep.SlowRounds"}],
    },
}
FILES = {
    "compare": {"base": LONG, "variants": {"a": None}, "seeds": "0,1"},
    "sweep": {**SEARCH, "base": LONG},
}
WORDS = {"compare": ["compare", "--config", "compare.yaml"], "sweep": ["sweep", "-s", "sweep.yaml"]}


@pytest.fixture(autouse=True)
def files(in_an_empty_folder):
    for command, content in FILES.items():
        Path(f"{command}.yaml").write_text(yaml.safe_dump(content))


@contextmanager
def started(command, out, *options):
    """Start a command as the leader of a session; nobody of it is left after the test."""
    words = [sys.executable, "-m", "fl_lightning", *WORDS[command], "--out", str(out), *options]
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


def command_of(pid):
    """Return a process's command and state, empty if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{state} {Path(f'/proc/{pid}/cmdline').read_text()}"
    except OSError:
        return ""


def kill(process, signum):
    process.send_signal(signum)
    process.wait()
    left = []

    def is_alone():
        left[:] = members(process.pid)
        return not left

    assert wait_until(is_alone, SECONDS), [command_of(pid) for pid in left]


@pytest.mark.parametrize(
    ("command", "signum"),
    [
        ("compare", signal.SIGKILL),
        pytest.param("sweep", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_runs_end_with_the_command_that_has_started_them(command, signum):
    with started(command, "out") as process:
        assert wait_until(lambda: trains("out"), 120), Path("out.txt").read_text()
        kill(process, signum)


def test_a_second_comparison_in_a_folder_is_refused(capsys):
    with sole_writer(Path("out", ".lock"), "wait"), pytest.raises(SystemExit) as ended:
        main([*WORDS["compare"], "--out", "out"])
    said = " ".join(f"{ended.value} {capsys.readouterr().err}".split())
    assert f"out: process {os.getpid()} is writing to this folder: wait for its end" in said
    assert [path.name for path in Path("out").rglob("*")] == [".lock"]


def results(command, out):
    """Return what a command has found, but for how long it took."""
    with Path(out, {"compare": "results.csv", "sweep": "trials.csv"}[command]).open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_nobody_is_left_of_ten_kills_at_any_moment_and_the_results_are_the_same(command):
    """One command is killed again and again in one folder, and then left in peace."""
    changes = {"compare": {"report": ["val/accuracy"]}, "sweep": {"trials": 3}}[command]
    content = {**FILES[command], "base": SLOW, **changes}
    Path(f"{command}.yaml").write_text(yaml.safe_dump(content))
    draws, killed = random.Random(command), []
    while len(killed) < KILLS:
        with started(command, "out", "--workers=1") as process:
            began, moment = time.time(), draws.choice(["import", "start", "round"])
            wait_until(partial(is_at, moment, began, process), 180)
            time.sleep(draws.uniform(0, 3))
            if process.poll() is not None:
                break
            kill(process, signum := draws.choice(SIGNALS))
            killed.append((moment, signum.name))
            print(*killed[-1])
    for out in ("out", "whole"):
        with started(command, out, "--workers=1") as process:
            assert process.wait(900) == 0, Path(f"{out}.txt").read_text()
    assert results(command, "out") == results(command, "whole")
    assert sum(moment == "round" for moment, _ in killed) >= 2


def is_at(moment, began, process):
    """Return whether a command that has begun then imports, starts its first run, or is in a round."""
    if moment == "import" or process.poll() is not None:
        return True
    name = {"start": "*.yaml", "round": "last.ckpt"}[moment]
    return any(path.stat().st_mtime > began for path in Path("out").rglob(name))
