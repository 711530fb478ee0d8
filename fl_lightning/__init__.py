"""Federated learning for PyTorch Lightning: any Lightning run, over many clients.

A map of the house; every room imports only from those above it in this list:

- `fl_lightning.core`: the vector space, updates, seeds, metrics, errors
- `fl_lightning.data`: partitions, shards, cohorts, data modules
- `fl_lightning.models`: LightningModules and small networks
- `fl_lightning.sparsity`: which parameters may move: masks, calibration, optimizers
- `fl_lightning.kernels`: C code behind one door, and what runs without a compiler
- `fl_lightning.client`: one client's local training
- `fl_lightning.updates`: an update on its way to the server
- `fl_lightning.server`: aggregation and the server's step
- `fl_lightning.privacy`: differential privacy
- `fl_lightning.secure`: means of updates that the server cannot read
- `fl_lightning.engines`: many clients in one step, and steps compiled
- `fl_lightning.federation`: rounds inside Lightning's fit loop
- `fl_lightning.callbacks`: mask calibration, per-client evaluation, backdoors, reports, the console
- `fl_lightning.nas`: architecture search
- `fl_lightning.flower`: the same rounds over a real network
- `fl_lightning.experiments`: many runs from one file
- `fl_lightning.cli`: the command ``fl-lightning``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fl_lightning.callbacks.backdoor_success import BackdoorSuccess
    from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
    from fl_lightning.callbacks.client_evaluation import ClientEvaluation
    from fl_lightning.callbacks.console.companions import companions
    from fl_lightning.callbacks.console.run_log import RunLog
    from fl_lightning.callbacks.partition_report import PartitionReport
    from fl_lightning.callbacks.progress import RoundProgressBar
    from fl_lightning.callbacks.report.run_report import RunReport
    from fl_lightning.cli.federated_cli import FederatedCLI
    from fl_lightning.client.corrections.feddyn import FedDyn
    from fl_lightning.client.corrections.fedlc import FedLC
    from fl_lightning.client.corrections.fedprox import FedProx
    from fl_lightning.client.corrections.moon import Moon
    from fl_lightning.client.corrections.scaffold import Scaffold
    from fl_lightning.client.personal.apfl import APFL
    from fl_lightning.client.personal.ditto import Ditto
    from fl_lightning.client.personal.fine_tuned import FineTuned
    from fl_lightning.client.personal.layers import Personal
    from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
    from fl_lightning.data.cohorts.cohort import AllClients, PoissonCohort, UniformCohort
    from fl_lightning.data.federated import FederatedDataModule
    from fl_lightning.federation import Attackers, FederatedStrategy, Federation
    from fl_lightning.models.image_classifier import ImageClassifier
    from fl_lightning.privacy.banded import BandedMatrixDP
    from fl_lightning.privacy.central import CentralDP
    from fl_lightning.privacy.distributed import DistributedDP
    from fl_lightning.privacy.example import ExampleDP
    from fl_lightning.privacy.local import LocalDP
    from fl_lightning.privacy.private_mean import AdaptiveClip
    from fl_lightning.server.means.mean import Mean, NormalisedMean, OverlapMean
    from fl_lightning.sparsity.optimizers.sparse_adamw import SparseAdamW
    from fl_lightning.sparsity.optimizers.sparse_sgdm import SparseSGDM

__all__ = [
    "APFL",
    "AdaptiveClip",
    "AllClients",
    "Attackers",
    "BackdoorSuccess",
    "BandedMatrixDP",
    "CentralDP",
    "ClientEvaluation",
    "ClientFailure",
    "ConfigurationError",
    "DistributedDP",
    "Ditto",
    "ExampleDP",
    "FedDyn",
    "FedLC",
    "FedProx",
    "FederatedCLI",
    "FederatedDataModule",
    "FederatedStrategy",
    "Federation",
    "FineTuned",
    "ImageClassifier",
    "LocalDP",
    "MaskCalibration",
    "Mean",
    "Moon",
    "NormalisedMean",
    "OverlapMean",
    "PartitionReport",
    "Personal",
    "PoissonCohort",
    "RoundFailure",
    "RoundProgressBar",
    "RunLog",
    "RunReport",
    "Scaffold",
    "SparseAdamW",
    "SparseSGDM",
    "UniformCohort",
    "companions",
]

# Imported when first asked for: PyTorch and Lightning take seconds (PEP 562).
_HOMES = {
    "APFL": "fl_lightning.client.personal.apfl",
    "AdaptiveClip": "fl_lightning.privacy.private_mean",
    "AllClients": "fl_lightning.data.cohorts.cohort",
    "Attackers": "fl_lightning.federation",
    "BackdoorSuccess": "fl_lightning.callbacks.backdoor_success",
    "BandedMatrixDP": "fl_lightning.privacy.banded",
    "CentralDP": "fl_lightning.privacy.central",
    "ClientEvaluation": "fl_lightning.callbacks.client_evaluation",
    "ClientFailure": "fl_lightning.core.errors",
    "ConfigurationError": "fl_lightning.core.errors",
    "DistributedDP": "fl_lightning.privacy.distributed",
    "Ditto": "fl_lightning.client.personal.ditto",
    "ExampleDP": "fl_lightning.privacy.example",
    "FedDyn": "fl_lightning.client.corrections.feddyn",
    "FedLC": "fl_lightning.client.corrections.fedlc",
    "FedProx": "fl_lightning.client.corrections.fedprox",
    "FederatedCLI": "fl_lightning.cli.federated_cli",
    "FederatedDataModule": "fl_lightning.data.federated",
    "FederatedStrategy": "fl_lightning.federation",
    "Federation": "fl_lightning.federation",
    "FineTuned": "fl_lightning.client.personal.fine_tuned",
    "ImageClassifier": "fl_lightning.models.image_classifier",
    "LocalDP": "fl_lightning.privacy.local",
    "MaskCalibration": "fl_lightning.callbacks.calibration.mask_calibration",
    "Mean": "fl_lightning.server.means.mean",
    "Moon": "fl_lightning.client.corrections.moon",
    "NormalisedMean": "fl_lightning.server.means.mean",
    "OverlapMean": "fl_lightning.server.means.mean",
    "PartitionReport": "fl_lightning.callbacks.partition_report",
    "Personal": "fl_lightning.client.personal.layers",
    "PoissonCohort": "fl_lightning.data.cohorts.cohort",
    "RoundFailure": "fl_lightning.core.errors",
    "RoundProgressBar": "fl_lightning.callbacks.progress",
    "RunLog": "fl_lightning.callbacks.console.run_log",
    "RunReport": "fl_lightning.callbacks.report.run_report",
    "Scaffold": "fl_lightning.client.corrections.scaffold",
    "SparseAdamW": "fl_lightning.sparsity.optimizers.sparse_adamw",
    "SparseSGDM": "fl_lightning.sparsity.optimizers.sparse_sgdm",
    "UniformCohort": "fl_lightning.data.cohorts.cohort",
    "companions": "fl_lightning.callbacks.console.companions",
}
_ROOMS = (
    "callbacks",
    "cli",
    "client",
    "core",
    "data",
    "engines",
    "experiments",
    "federation",
    "kernels",
    "models",
    "flower",
    "nas",
    "privacy",
    "secure",
    "server",
    "sparsity",
    "updates",
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_ROOMS})
