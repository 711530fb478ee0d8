"""Federated learning for PyTorch Lightning: any Lightning run, over many clients.

A map of the house; every room imports only from those above it in this list:

- `fl_lightning.core`: the vector space, updates, seeds, metrics, errors
- `fl_lightning.data`: partitions, shards, cohorts, data modules
- `fl_lightning.models`: LightningModules and small networks
- `fl_lightning.client`: one client's local training
- `fl_lightning.server`: aggregation and the server's step
- `fl_lightning.federation`: rounds inside Lightning's fit loop
- `fl_lightning.callbacks`: partition report, per-client evaluation, progress bar
- `fl_lightning.cli`: ``fl-lightning fit | validate | test | predict``
"""

from fl_lightning.callbacks.client_evaluation import ClientEvaluation
from fl_lightning.callbacks.partition_report import PartitionReport
from fl_lightning.callbacks.progress import RoundProgressBar
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.data.cohort import AllClients, PoissonCohort, UniformCohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.strategy import FederatedStrategy
from fl_lightning.models.image_classifier import ImageClassifier
from fl_lightning.server.aggregators import Mean

__all__ = [
    "AllClients",
    "ClientEvaluation",
    "ClientFailure",
    "ConfigurationError",
    "FederatedDataModule",
    "FederatedStrategy",
    "Federation",
    "ImageClassifier",
    "Mean",
    "PartitionReport",
    "PoissonCohort",
    "RoundFailure",
    "RoundProgressBar",
    "UniformCohort",
]
