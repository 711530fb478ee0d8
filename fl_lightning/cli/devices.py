"""Number of processes of a run with ``trainer.devices: auto``.

Lightning's ``auto`` means all GPUs, or one process on a CPU. Here it means, first, the processes that torchrun,
SLURM or MPI have started (under plain Lightning, each of them would train everything by itself). Otherwise a
federation on CPUs gets one process of one thread for each physical core: clients train independently, so n
processes are nearly n times as fast as one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator
from lightning.pytorch.loggers import CometLogger

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Federation, can_fork, limited, num_usable_cores

_ENVIRONMENTS = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)


def asks_for_several(trainer: Mapping[str, Any]) -> bool:
    """Return whether a Trainer with these options would run several processes.

    Example:
        >>> asks_for_several({"accelerator": "cpu", "devices": "2", "num_nodes": 1})
        True
        >>> asks_for_several({"accelerator": "cpu", "devices": "auto", "num_nodes": 1})
        False
    """
    devices = trainer["devices"]
    if trainer["num_nodes"] > 1:
        return True
    if str(devices) in ("auto", "-1"):
        on_gpu = trainer["accelerator"] in ("auto", "gpu", "cuda")
        return on_gpu and torch.cuda.device_count() > 1
    return _num_devices(devices) > 1


def automatic_processes(
    trainer: Mapping[str, Any], federation: Federation, data: Any, num_threads: int | None
) -> int:
    """Return how many processes a fit on CPUs should start; 1 if the configuration sets the number itself.

    It is the number of usable cores, but at most the number of clients in a round. It is 1 if processes
    cannot be forked, if torchrun or SLURM has started processes, or if ``num_threads`` is above 1.
    """
    if not _is_open(trainer) or (num_threads or 1) > 1 or not _starts_its_own():
        return 1
    loggers = trainer.get("logger")
    loggers = loggers if isinstance(loggers, Sequence) else [loggers]
    if any(isinstance(logger, CometLogger) for logger in loggers):
        return 1  # its threads would be missing in a forked process
    num_clients = data.num_clients if isinstance(data, FederatedDataModule) else 1
    cores = num_usable_cores()
    if num_clients is None:  # known only after setup; more processes than clients do no harm
        return cores
    limit = trainer["limit_train_batches"]
    cohort = federation.cohort.expected_size(num_clients)
    return max(1, min(cores, limited(cohort, 1.0 if limit is None else limit)))


def _is_open(trainer: Mapping[str, Any]) -> bool:
    on_cpu = trainer["accelerator"] == "cpu" or (
        trainer["accelerator"] == "auto"
        and not CUDAAccelerator.is_available()
        and not MPSAccelerator.is_available()
    )
    return (
        on_cpu
        and trainer["devices"] == "auto"
        and trainer["num_nodes"] == 1
        and trainer["strategy"] in ("auto", "federated")
        and not trainer["plugins"]
        and not trainer["fast_dev_run"]
    )


def _starts_its_own() -> bool:
    """Return whether this process may fork others: on Linux, and not started by a launcher such as torchrun."""
    taken = "LOCAL_RANK" in os.environ or any(e.detect() for e in _ENVIRONMENTS)
    return not taken and sys.platform == "linux" and can_fork()


@dataclass(frozen=True)
class Started:
    """How many processes a launcher such as torchrun has started for this run.

    Attributes:
        by: name of the launcher.
        total: number of processes.
        per_node: number of processes on each machine.
    """

    by: str
    total: int
    per_node: int


# Environment variables with the total number of processes, and with the number on this machine; the first
# variable that is set counts.
_TORCHRUN = ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",)
# variables of the job step: the batch script itself is one process, for any number of tasks of its job
_SLURM = ("SLURM_STEP_NUM_TASKS",), ("SLURM_STEP_NUM_NODES",)
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def started(environ: Mapping[str, str] = os.environ) -> Started | None:
    """Return how many processes a launcher such as torchrun has started for this run; None without a launcher.

    Example:
        >>> started({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
        Started(by='torchrun', total=4, per_node=2)
        >>> started({"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "2"})
        Started(by='srun', total=6, per_node=3)
        >>> started({"SLURM_NTASKS": "6"}) is None  # a batch script that has not called srun
        True
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        total, per_node = (_number(names, environ) for names in _TORCHRUN)
        by = "torchrun"
    # Lightning does not count interactive jobs as started by srun either
    elif "SLURM_STEP_NUM_TASKS" in environ and environ.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    ):
        total, num_nodes = (_number(names, environ) for names in _SLURM)
        by, per_node = "srun", (total or 1) // (num_nodes or 1)
    else:
        total, per_node = (_number(names, environ) for names in _MPI)
        by = "mpirun"
    if total is None or total == 1:
        return None
    return Started(by, total, per_node or total)


def take_what_was_started(trainer: Any) -> None:
    """Set a Trainer's ``devices`` and ``num_nodes`` to the processes that a launcher such as torchrun has started.

    Raises:
        ConfigurationError: if the options ask for another number of processes than were started, or
            mpi4py is missing under mpirun.
    """
    found = started()
    if found is None or trainer["plugins"] or trainer["fast_dev_run"]:
        return
    if found.by == "mpirun" and find_spec("mpi4py") is None:
        raise ConfigurationError(
            f"mpirun has started {found.total} processes, which cannot connect to each other without mpi4py: "
            "install mpi4py, or start the processes with torchrun"
        )
    num_nodes = found.total // found.per_node
    if str(trainer["devices"]) in ("auto", "-1"):
        trainer["devices"] = found.per_node
        if trainer["num_nodes"] == 1:
            trainer["num_nodes"] = num_nodes
    asked = _num_devices(trainer["devices"]) * trainer["num_nodes"]
    if asked != found.total:
        raise ConfigurationError(
            f"trainer.devices {trainer['devices']} and trainer.num_nodes {trainer['num_nodes']} ask for {asked} "
            f"processes, but {found.by} has started {found.total} processes on {num_nodes} nodes: leave both "
            f"options out, or start {asked} processes"
        )


def _number(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)


def _num_devices(devices: int | str | list[int]) -> int:
    if isinstance(devices, str):
        return int(devices) if devices.isdecimal() else len(devices.split(","))
    return devices if isinstance(devices, int) else len(devices)
