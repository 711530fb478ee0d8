"""How many processes a run on the command line has, where that is left to it.

Lightning's ``devices: auto`` means all GPUs, and on a CPU one process. In a federation it means all
physical cores there: clients train apart, so that a process for each core, of one thread each, is
nearly as many times as fast as one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator
from lightning.pytorch.loggers import CometLogger

from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Federation, can_fork, limited, num_usable_cores

_ENVIRONMENTS = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)


def asks_for_several(trainer: Mapping[str, Any]) -> bool:
    """Return whether a Trainer with these settings would have several processes.

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
    if isinstance(devices, str):
        devices = int(devices) if devices.isdecimal() else devices.split(",")
    return (devices if isinstance(devices, int) else len(devices)) > 1


def automatic_processes(
    trainer: Mapping[str, Any], federation: Federation, data: Any, num_threads: int | None
) -> int:
    """Return how many processes a fit on CPUs should have if the user leaves it open, else 1.

    As many as there are usable cores, and no more than clients in a round. One where the processes
    could not be forked or come from elsewhere (torchrun, SLURM), and where several threads were
    asked for.

    Args:
        trainer: the Trainer's settings.
        federation: whose cohorts are shared out.
        data: the data module.
        num_threads: what the user asked for.
    """
    if not _is_open(trainer) or (num_threads or 1) > 1 or not _starts_its_own():
        return 1
    if any(isinstance(logger, CometLogger) for logger in _listed(trainer.get("logger"))):
        return 1  # its threads, begun with it, would not be there after a fork
    num_clients = data.num_clients if isinstance(data, FederatedDataModule) else 1
    cores = num_usable_cores()
    if num_clients is None:  # the data know: more processes than clients do no harm
        return cores
    limit = trainer["limit_train_batches"]
    cohort = federation.cohort.expected_size(num_clients)
    return max(1, min(cores, limited(cohort, 1.0 if limit is None else limit)))


def _listed(logger: Any) -> Sequence[Any]:
    return logger if isinstance(logger, Sequence) else [logger]


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
    """Return whether processes can be started from here, and nobody else has started some."""
    taken = "LOCAL_RANK" in os.environ or any(e.detect() for e in _ENVIRONMENTS)
    return not taken and sys.platform == "linux" and can_fork()
