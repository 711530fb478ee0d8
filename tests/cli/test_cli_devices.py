"""How many processes a fit has: those that a launcher has started, else one for each core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import toy_data

from fl_lightning import Federation, PoissonCohort, UniformCohort
from fl_lightning.cli.devices import (
    Started,
    automatic_processes,
    started,
    take_what_was_started,
)
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.processes.fork import can_fork

OPEN = {
    "accelerator": "cpu",
    "devices": "auto",
    "num_nodes": 1,
    "strategy": "auto",
    "plugins": None,
    "fast_dev_run": False,
    "limit_train_batches": None,
}


@pytest.fixture
def three_cores(monkeypatch):
    if not can_fork():
        pytest.skip("processes cannot be forked here")
    monkeypatch.setattr("fl_lightning.cli.devices.num_usable_cores", lambda: 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("three_cores")
class TestOfItsOwn:
    @pytest.mark.parametrize(
        ("trainer", "cohort", "num_threads", "expected"),
        [
            ({}, None, None, 3),
            ({}, None, 1, 3),
            ({"strategy": "federated"}, None, None, 3),
            ({}, UniformCohort(size=2), None, 2),
            ({}, PoissonCohort(fraction=0.1), None, 1),
            ({"limit_train_batches": 2}, None, None, 2),
            ({"limit_train_batches": 0.5}, None, None, 3),
            ({"limit_train_batches": 0.2}, None, None, 1),
            # what the user has asked for stays
            ({}, None, 2, 1),
            ({"devices": 1}, None, None, 1),
            ({"devices": "2"}, None, None, 1),
            ({"accelerator": "gpu"}, None, None, 1),
            ({"num_nodes": 2}, None, None, 1),
            ({"strategy": "ddp"}, None, None, 1),
            ({"fast_dev_run": True}, None, None, 1),
            ({"plugins": ["something"]}, None, None, 1),
        ],
    )
    def test_a_core_each_at_most_as_many_as_clients(self, trainer, cohort, num_threads, expected):
        federation = Federation(cohort=cohort)
        found = automatic_processes(OPEN | trainer, federation, toy_data(6), num_threads)
        assert found == expected

    @pytest.mark.parametrize(
        "environment",
        [
            {"LOCAL_RANK": "0"},
            {"TORCHELASTIC_RUN_ID": "1"},
            {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "x", "JSM_NAMESPACE_LOCAL_RANK": "0"}
            | {"JSM_NAMESPACE_SIZE": "1"},
        ],
    )
    def test_one_where_a_launcher_has_started_others(self, monkeypatch, environment):
        for name, value in environment.items():
            monkeypatch.setitem(os.environ, name, value)
        assert automatic_processes(OPEN, Federation(), toy_data(6), None) == 1


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
    with pytest.raises(
        ConfigurationError, match="install mpi4py, or start the processes with torchrun"
    ):
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
