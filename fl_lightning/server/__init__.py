"""Floor 3: from many updates to a model."""

from fl_lightning.server.cluster_average import ClusterFedAvg
from fl_lightning.server.staleness import (
    FedAsync,
    FedBuff,
    HingeStaleness,
    PolynomialStaleness,
    Staleness,
)

__all__ = [
    "ClusterFedAvg",
    "FedAsync",
    "FedBuff",
    "HingeStaleness",
    "PolynomialStaleness",
    "Staleness",
]
