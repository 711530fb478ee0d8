"""The server: aggregators, robust rules, attacks on them, server optimizers, asynchronous rules."""

from fl_lightning.core.kinds import exports
from fl_lightning.server.adapters import FedExLoRA as FedExLoRA
from fl_lightning.server.adapters import FlexLoRA as FlexLoRA
from fl_lightning.server.adapters import FLoRA as FLoRA
from fl_lightning.server.adapters import HetLoRA as HetLoRA
from fl_lightning.server.aggregator import Aggregator as Aggregator
from fl_lightning.server.aggregator import WeightedMean as WeightedMean
from fl_lightning.server.attacks import ALIE as ALIE
from fl_lightning.server.attacks import Forgery as Forgery
from fl_lightning.server.attacks import GaussianNoise as GaussianNoise
from fl_lightning.server.attacks import InnerProductManipulation as InnerProductManipulation
from fl_lightning.server.attacks import MinMax as MinMax
from fl_lightning.server.attacks import Scaling as Scaling
from fl_lightning.server.attacks import SignFlip as SignFlip
from fl_lightning.server.means.cluster_average import ClusterFedAvg as ClusterFedAvg
from fl_lightning.server.means.fair_means import AFL as AFL
from fl_lightning.server.means.fair_means import QFedAvg as QFedAvg
from fl_lightning.server.means.fair_means import TiltedMean as TiltedMean
from fl_lightning.server.means.mean import Mean as Mean
from fl_lightning.server.means.mean import OverlapMean as OverlapMean
from fl_lightning.server.optimizers import FedAdagrad as FedAdagrad
from fl_lightning.server.optimizers import FedAdam as FedAdam
from fl_lightning.server.optimizers import FedLion as FedLion
from fl_lightning.server.optimizers import FedYogi as FedYogi
from fl_lightning.server.robust.krum import Bulyan as Bulyan
from fl_lightning.server.robust.krum import Krum as Krum
from fl_lightning.server.robust.krum import MultiKrum as MultiKrum
from fl_lightning.server.robust.matrix import Floats as Floats
from fl_lightning.server.robust.matrix import Rows as Rows
from fl_lightning.server.robust.passes import combined as combined
from fl_lightning.server.robust.passes import row_norms as row_norms
from fl_lightning.server.robust.reweighted import CentredClipping as CentredClipping
from fl_lightning.server.robust.reweighted import FLTrust as FLTrust
from fl_lightning.server.robust.reweighted import GeometricMedian as GeometricMedian
from fl_lightning.server.robust.reweighted import NormBounding as NormBounding
from fl_lightning.server.robust.rule import Bucketing as Bucketing
from fl_lightning.server.robust.rule import Median as Median
from fl_lightning.server.robust.rule import NearestNeighbourMixing as NearestNeighbourMixing
from fl_lightning.server.robust.rule import RobustRule as RobustRule
from fl_lightning.server.robust.rule import RuleContext as RuleContext
from fl_lightning.server.robust.rule import TrimmedMean as TrimmedMean
from fl_lightning.server.server import Server as Server
from fl_lightning.server.staleness import FedAsync as FedAsync
from fl_lightning.server.staleness import FedBuff as FedBuff
from fl_lightning.server.staleness import HingeStaleness as HingeStaleness
from fl_lightning.server.staleness import PolynomialStaleness as PolynomialStaleness
from fl_lightning.server.staleness import Staleness as Staleness

__all__ = list(exports(__file__, globals()))
