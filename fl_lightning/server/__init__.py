"""From many updates to a model."""

from fl_lightning.server.aggregator import Aggregator, WeightedMean
from fl_lightning.server.attacks.alone import GaussianNoise, Scaling, SignFlip
from fl_lightning.server.attacks.forged import Forgery
from fl_lightning.server.attacks.together import ALIE, InnerProductManipulation, MinMax
from fl_lightning.server.means.agnostic_mean import AFL
from fl_lightning.server.means.cluster_average import ClusterFedAvg
from fl_lightning.server.means.fair_means import QFedAvg, TiltedMean
from fl_lightning.server.means.mean import Mean
from fl_lightning.server.means.overlap_mean import OverlapMean
from fl_lightning.server.optimizers.adaptive import FedAdagrad, FedAdam, FedYogi
from fl_lightning.server.optimizers.lion import FedLion
from fl_lightning.server.robust.bulyan import Bulyan
from fl_lightning.server.robust.centred_clipping import CentredClipping
from fl_lightning.server.robust.collect import Collected
from fl_lightning.server.robust.fltrust import FLTrust
from fl_lightning.server.robust.geometric_median import GeometricMedian
from fl_lightning.server.robust.krum import Krum, MultiKrum
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.median import Median, TrimmedMean
from fl_lightning.server.robust.mixing import Bucketing, NearestNeighbourMixing
from fl_lightning.server.robust.norm_bounding import NormBounding
from fl_lightning.server.robust.passes import combined, row_norms
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
