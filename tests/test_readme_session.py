"""What the README tells a new user to type, typed, and what it promises, seen."""

import csv
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICKSTART = "uv run fl-lightning fit --config configs/quickstart.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that looks like the repository but takes the runs."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def type_in(command, folder):
    """Run a command of the README with this environment's programs and return what it prints."""
    assert command in README
    words = [word for word in shlex.split(command) if word not in ("uv", "run")]
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        words, check=False, cwd=folder, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def quickstart(folder):
    began = time.monotonic()
    said = type_in(QUICKSTART, folder)
    return said, time.monotonic() - began


def accuracy(said):
    return float(re.search(r"test/accuracy +│ +([0-9.]+)", said).group(1))


def test_the_quickstart_keeps_its_promises(quickstart, folder):
    said, seconds = quickstart
    assert accuracy(said) >= 0.9
    assert seconds < 180  # start and test included, on a busy machine
    assert "tensorboard --logdir runs" in said
    assert re.search(r"Round 50/50.*train/loss=", said)
    assert re.search(r"clients: val/accuracy mean .* worst decile .* over 20 clients", said)
    with (folder / "runs/quickstart/version_0/partition.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["num_classes"] for row in rows] == ["5"] * 20


@pytest.mark.usefixtures("quickstart")
def test_the_saved_model_is_tested_to_the_same_accuracy(folder):
    command = (
        "uv run fl-lightning test --config configs/quickstart.yaml "
        "--ckpt_path runs/quickstart/version_0/checkpoints/best.ckpt"
    )
    said = type_in(command, folder)
    assert accuracy(said) >= 0.9
    assert "over 20 clients" in said


def test_resuming_a_finished_run_trains_no_more(quickstart, folder):
    said = type_in(f"{QUICKSTART} --ckpt_path last", folder)
    assert accuracy(said) == accuracy(quickstart[0])


@pytest.mark.usefixtures("quickstart")
def test_the_same_files_train_centrally(folder):
    said = type_in(f"{QUICKSTART} --config configs/centralized.yaml", folder)
    assert accuracy(said) >= 0.9
    assert "Round" not in said


def test_ten_thousand_clients_cost_no_more_memory_than_ten(folder):
    said = type_in("uv run python -m benchmarks.memory", folder)
    assert int(re.search(r"([+-]\d+) MB$", said.strip()).group(1)) <= 200
