"""Processes that torchrun, SLURM or MPI have started are one run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fl_lightning.cli.devices import Started, started, take_what_was_started
from fl_lightning.core.errors import ConfigurationError

CONFIG = Path(__file__).with_name("small_run.yaml")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
AUTO = {"devices": "auto", "num_nodes": 1, "plugins": None, "fast_dev_run": False}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"WORLD_SIZE": "4"}, None),  # somebody's own script, which says nothing of who started it
        (TORCHRUN, Started("torchrun", 4, 2)),
        (TORCHRUN | {"WORLD_SIZE": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}, Started("srun", 4, 1)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # a batch script that has not called srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Started("mpirun", 2, 2)),
        ({"PMI_SIZE": "6", "MPI_LOCALNRANKS": "3"}, Started("mpirun", 6, 3)),
    ],
)
def test_who_started_how_many(environ, found):
    assert started(environ) == found


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setitem(os.environ, name, value)


@pytest.mark.usefixtures("under_torchrun")
@pytest.mark.parametrize("given", [{}, {"devices": -1}, {"devices": 2, "num_nodes": 2}])
def test_auto_is_what_was_started(given):
    options = AUTO | given
    take_what_was_started(options)
    assert (options["devices"], options["num_nodes"]) == (2, 2)


@pytest.mark.usefixtures("under_torchrun")
@pytest.mark.parametrize("given", [{"devices": 1}, {"devices": "3"}, {"devices": [0, 1]}])
def test_other_numbers_are_refused(given):
    with pytest.raises(ConfigurationError, match="torchrun has started 4 processes on 2 nodes"):
        take_what_was_started(AUTO | given)


def test_mpirun_needs_mpi4py(monkeypatch):
    monkeypatch.setitem(os.environ, "OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("fl_lightning.cli.devices.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="install mpi4py, or start them with torchrun"):
        take_what_was_started(dict(AUTO))


@pytest.mark.slow
def test_torchrun_starts_one_run(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    fit = ["-m", "fl_lightning", "fit", "--config", str(CONFIG)]
    ended = subprocess.run(
        [*torchrun, *fit, "--trainer.devices", "auto", "--trainer.logger", "false"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    (last,) = tmp_path.rglob("last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == 2
    assert checkpoint["callbacks"]["Federation"]["ranks"] == 2
