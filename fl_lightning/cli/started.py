"""Processes that torchrun, SLURM or MPI have started for a run on the command line.

Lightning's ``devices: auto`` is one process on a CPU, whoever has started how many: each would train
all by itself. Here it means those that were started, which are one run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fl_lightning.core.errors import ConfigurationError


@dataclass(frozen=True)
class Started:
    """Processes that were started from outside.

    Attributes:
        by: which program started them.
        total: how many there are.
        per_node: how many of them are on each machine.
    """

    by: str
    total: int
    per_node: int


# How many there are, and how many on this machine; the first name that is set counts.
_TORCHRUN = ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",)
# of the job's step: a batch script is one process, whatever its job has room for
_SLURM = ("SLURM_STEP_NUM_TASKS",), ("SLURM_STEP_NUM_NODES",)
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def started(environ: Mapping[str, str] = os.environ) -> Started | None:
    """Return which processes were started together with this one, None if it was started alone.

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
    elif _is_of_srun(environ):
        total, num_nodes = (_number(names, environ) for names in _SLURM)
        by, per_node = "srun", (total or 1) // (num_nodes or 1)
    else:
        total, per_node = (_number(names, environ) for names in _MPI)
        by = "mpirun"
    if total is None or total == 1:
        return None
    return Started(by, total, per_node or total)


def take_what_was_started(trainer: Any) -> None:
    """Let ``devices: auto`` mean the processes that were started from outside.

    Args:
        trainer: the Trainer's settings, changed in place.

    Raises:
        ConfigurationError: if other numbers of processes are set than were started, or they could not
            find each other.
    """
    found = started()
    if found is None or trainer["plugins"] or trainer["fast_dev_run"]:
        return
    if found.by == "mpirun" and find_spec("mpi4py") is None:
        raise ConfigurationError(
            f"mpirun has started {found.total} processes, which cannot find each other without "
            "mpi4py, and each would train alone: install mpi4py, or start them with torchrun"
        )
    num_nodes = found.total // found.per_node
    if str(trainer["devices"]) in ("auto", "-1"):
        trainer["devices"] = found.per_node
        if trainer["num_nodes"] == 1:
            trainer["num_nodes"] = num_nodes
    asked = _num_devices(trainer["devices"]) * trainer["num_nodes"]
    if asked != found.total:
        raise ConfigurationError(
            f"trainer.devices: {trainer['devices']} on trainer.num_nodes: {trainer['num_nodes']}, "
            f"but {found.by} has started {found.total} processes on {num_nodes} nodes. Leave both "
            f"out, or start {asked}"
        )


def _is_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether Lightning takes these processes for SLURM's, too."""
    is_interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_STEP_NUM_TASKS" in environ and not is_interactive


def _number(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)


def _num_devices(devices: int | str | list[int]) -> int:
    if isinstance(devices, str):
        return int(devices) if devices.isdecimal() else len(devices.split(","))
    return devices if isinstance(devices, int) else len(devices)
