"""Federated learning for PyTorch Lightning: any Lightning run, over many clients.

A map of the house; every room imports only from those above it in this list:

- `fl_lightning.core`: the vector space, updates, seeds, metrics, errors
- `fl_lightning.data`: partitions, shards, cohorts, data modules
- `fl_lightning.models`: LightningModules and small networks
- `fl_lightning.sparsity`: which parameters may move: masks, calibration, optimizers
- `fl_lightning.kernels`: C code behind one door, and what runs without a compiler
- `fl_lightning.client`: one client's local training
- `fl_lightning.updates` and `fl_lightning.server`: an update's way to the server, aggregation, its step
- `fl_lightning.privacy`: differential privacy
- `fl_lightning.secure`: means of updates that the server cannot read
- `fl_lightning.engines`: many clients in one step, and steps compiled
- `fl_lightning.federation`: rounds inside Lightning's fit loop
- `fl_lightning.reports`: pages and figures of runs, progress and log files
- `fl_lightning.callbacks`: mask calibration, per-client evaluation, backdoors, retention
- `fl_lightning.nas`: architecture search
- `fl_lightning.flower`: the same rounds over a real network
- `fl_lightning.experiments`: many runs from one file
- `fl_lightning.cli`: the command ``fl-lightning``
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.core.kinds import with_checked_kinds
from fl_lightning.core.public_names import exported

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fl_lightning.callbacks.backdoor_success import BackdoorSuccess as BackdoorSuccess
    from fl_lightning.callbacks.calibration.mask_calibration import (
        MaskCalibration as MaskCalibration,
    )
    from fl_lightning.callbacks.client_evaluation import ClientEvaluation as ClientEvaluation
    from fl_lightning.callbacks.retention import Retention as Retention
    from fl_lightning.callbacks.standard_callbacks import standard_callbacks as standard_callbacks
    from fl_lightning.cli.federated_cli import FederatedCLI as FederatedCLI
    from fl_lightning.client.corrections.drift import FedDyn as FedDyn
    from fl_lightning.client.corrections.drift import FedProx as FedProx
    from fl_lightning.client.corrections.drift import Scaffold as Scaffold
    from fl_lightning.client.corrections.losses import FedLC as FedLC
    from fl_lightning.client.corrections.losses import Moon as Moon
    from fl_lightning.client.personal import APFL as APFL
    from fl_lightning.client.personal import Ditto as Ditto
    from fl_lightning.client.personal import FineTuned as FineTuned
    from fl_lightning.client.personal import Personal as Personal
    from fl_lightning.core.errors import ClientFailure as ClientFailure
    from fl_lightning.core.errors import ConfigurationError as ConfigurationError
    from fl_lightning.core.errors import RoundFailure as RoundFailure
    from fl_lightning.data.cohorts.cohort import AllClients as AllClients
    from fl_lightning.data.cohorts.cohort import PoissonCohort as PoissonCohort
    from fl_lightning.data.cohorts.cohort import UniformCohort as UniformCohort
    from fl_lightning.data.federated import FederatedDataModule as FederatedDataModule
    from fl_lightning.federation import Attackers as Attackers
    from fl_lightning.federation import FederatedStrategy as FederatedStrategy
    from fl_lightning.federation import Federation as Federation
    from fl_lightning.models.image_classifier import ImageClassifier as ImageClassifier
    from fl_lightning.privacy.banded import BandedMatrixDP as BandedMatrixDP
    from fl_lightning.privacy.central import CentralDP as CentralDP
    from fl_lightning.privacy.distributed import DistributedDP as DistributedDP
    from fl_lightning.privacy.distributed import LocalDP as LocalDP
    from fl_lightning.privacy.example import ExampleDP as ExampleDP
    from fl_lightning.privacy.private_mean import AdaptiveClip as AdaptiveClip
    from fl_lightning.reports.log_file import RunLog as RunLog
    from fl_lightning.reports.overview import PartitionReport as PartitionReport
    from fl_lightning.reports.progress import RoundProgressBar as RoundProgressBar
    from fl_lightning.reports.run_charts import partition_figure as partition_figure
    from fl_lightning.reports.run_report import RunReport as RunReport
    from fl_lightning.server.means.mean import Mean as Mean
    from fl_lightning.server.means.mean import NormalisedMean as NormalisedMean
    from fl_lightning.server.means.mean import OverlapMean as OverlapMean
    from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW as SparseAdamW
    from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM as SparseSGDM

# Imported when first asked for: PyTorch and Lightning take seconds (PEP 562).
_MODULES = exported(__file__)
_ROOMS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    return globals().setdefault(name, with_checked_kinds(found))


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_ROOMS})
