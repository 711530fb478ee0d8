"""A run killed with SIGKILL and taken up again ends in the same bits."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import typed

from fl_lightning.cli import main

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ROUNDS = 6


def command(folder, *more):
    return [
        *("fl-lightning", "fit", "--config", str(CONFIG)),
        *(
            "--trainer.max_epochs",
            str(ROUNDS),
            "--trainer.enable_progress_bar",
            "false",
            "--report",
            "false",
        ),
        *("--trainer.logger.init_args.save_dir", str(folder), "--test_after_fit", "false"),
        *("--federation.cohort.init_args.fraction", "0.5", "--federation.local_epochs", "2", *more),
    ]


def typed_in(folder, *more):
    programs = str(Path(sys.executable).parent)
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    folder.mkdir(exist_ok=True)
    said = [folder / "out.txt", folder / "err.txt"]
    return typed.start(command(folder, *more), folder, variables, said)


def final_state(folder):
    last = next(Path(folder).rglob("last.ckpt"))
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == ROUNDS
    return checkpoint["state_dict"]


def test_killed_and_resumed_is_bit_identical(tmp_path):
    one = ("--trainer.devices", "1")
    killed = typed_in(tmp_path / "killed", *one)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "killed").rglob("last.ckpt")):
        assert time.monotonic() < deadline
        assert killed.is_alive(), "it ended before its first checkpoint"
        time.sleep(0.01)
    time.sleep(0.15)  # into the next round
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    saved = torch.load(next((tmp_path / "killed").rglob("last.ckpt")), weights_only=True)
    assert 1 <= saved["global_step"] < ROUNDS

    whole = typed_in(tmp_path / "whole", *one)
    resumed = typed_in(tmp_path / "killed", *one, "--ckpt_path", "last")
    for process in (whole, resumed):
        process.join()
        assert process.exitcode == 0
    expected, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "killed")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def started(arguments):
    """The command line in a process of its own, which forks the run's processes."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(arguments,))
    process.start()
    return process


@pytest.mark.slow
def test_two_processes_killed_and_resumed_are_bit_identical(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    more = ("--trainer.devices", "2", "--federation.local_epochs", "1")
    arguments = [command(tmp_path / name, *more)[1:] for name in ("whole", "killed")]
    killed = started(arguments[1])
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").rglob("last.ckpt")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)  # into another round
    killed.kill()
    killed.join()
    saved = torch.load(next((tmp_path / "killed").rglob("last.ckpt")), weights_only=True)
    assert 1 <= saved["global_step"] < ROUNDS

    for each in (arguments[0], [*arguments[1], "--ckpt_path", "last"]):
        process = started(each)
        process.join()
        assert process.exitcode == 0
    expected, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "killed")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    folders = [path.name for path in (tmp_path / "killed" / "quickstart").iterdir()]
    assert folders == ["version_0"]
