"""The server: aggregators, robust rules, attacks on them, server optimizers, asynchronous rules."""

from fl_lightning.server.aggregator import Aggregator, WeightedMean
from fl_lightning.server.attacks import (
    ALIE,
    Forgery,
    GaussianNoise,
    InnerProductManipulation,
    MinMax,
    Scaling,
    SignFlip,
)
from fl_lightning.server.means.cluster_average import ClusterFedAvg
from fl_lightning.server.means.fair_means import AFL, QFedAvg, TiltedMean
from fl_lightning.server.means.mean import Mean, OverlapMean
from fl_lightning.server.optimizers import FedAdagrad, FedAdam, FedLion, FedYogi
from fl_lightning.server.robust.collect import Collected
from fl_lightning.server.robust.krum import Bulyan, Krum, MultiKrum
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.median import Median, TrimmedMean
from fl_lightning.server.robust.mixing import Bucketing, NearestNeighbourMixing
from fl_lightning.server.robust.passes import combined, row_norms
from fl_lightning.server.robust.reweighted import (
    CentredClipping,
    FLTrust,
    GeometricMedian,
    NormBounding,
)
from fl_lightning.server.robust.rule import RobustRule, RuleContext
from fl_lightning.server.server import Server
from fl_lightning.server.staleness import (
    FedAsync,
    FedBuff,
    HingeStaleness,
    PolynomialStaleness,
    Staleness,
)

__all__ = [
    "AFL",
    "ALIE",
    "Aggregator",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "ClusterFedAvg",
    "Collected",
    "FLTrust",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedBuff",
    "FedLion",
    "FedYogi",
    "Floats",
    "Forgery",
    "GaussianNoise",
    "GeometricMedian",
    "HingeStaleness",
    "InnerProductManipulation",
    "Krum",
    "Mean",
    "Median",
    "MinMax",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormBounding",
    "OverlapMean",
    "PolynomialStaleness",
    "QFedAvg",
    "RobustRule",
    "Rows",
    "RuleContext",
    "Scaling",
    "Server",
    "SignFlip",
    "Staleness",
    "TiltedMean",
    "TrimmedMean",
    "WeightedMean",
    "combined",
    "row_norms",
]
