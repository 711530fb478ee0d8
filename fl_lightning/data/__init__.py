"""Data: sources, partitions of their examples over clients, and cohorts of clients."""

from fl_lightning.data.client_examples import ExampleTransform, LabelPermutation, QuarterTurns
from fl_lightning.data.cohorts.availability import Availability, AvailableCohort, Diurnal, Stretches
from fl_lightning.data.cohorts.cohort import (
    AllClients,
    Cohort,
    CohortSampler,
    PoissonCohort,
    SizedCohort,
    UniformCohort,
)
from fl_lightning.data.cohorts.oort import OortCohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.cohorts.weighted_cohorts import (
    ByLossCohort,
    BySizeCohort,
    LeastRecentCohort,
    PowerOfChoiceCohort,
    RoundRobinCohort,
)
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.inputs import FederatedNormalize, InputTransform, Normalize, Reshape
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClass, DirichletPerClient
from fl_lightning.data.partitions.flat_shards import FlatShards
from fl_lightning.data.partitions.label_shards import LabelShards, McMahanShards
from fl_lightning.data.partitions.partition import (
    IID,
    NaturalPartition,
    Partition,
    PartitionRule,
    check_sizes,
    shards_of,
)
from fl_lightning.data.partitions.quantity_skew import DirichletSizes, PowerLawSizes
from fl_lightning.data.poisoning import LabelFlip, Poison, Trigger
from fl_lightning.data.sources.arrays import Arrays
from fl_lightning.data.sources.bundled import Digits, Iris
from fl_lightning.data.sources.hugging_face import HuggingFace
from fl_lightning.data.sources.image_folder import ImageFolder
from fl_lightning.data.sources.image_source import ImageTensors
from fl_lightning.data.sources.table import Table
from fl_lightning.data.sources.torchvision_sources import CIFAR10, CIFAR100, MNIST, FashionMNIST
from fl_lightning.data.summary import PartitionSummary

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "MNIST",
    "AllClients",
    "Arrays",
    "Availability",
    "AvailableCohort",
    "ByLossCohort",
    "BySizeCohort",
    "ClientIds",
    "Cohort",
    "CohortSampler",
    "Digits",
    "DirichletPerClass",
    "DirichletPerClient",
    "DirichletSizes",
    "Diurnal",
    "ExampleTransform",
    "FashionMNIST",
    "FederatedDataModule",
    "FederatedNormalize",
    "FlatShards",
    "HuggingFace",
    "ImageFolder",
    "ImageTensors",
    "InputTransform",
    "Iris",
    "LabelFlip",
    "LabelPermutation",
    "LabelShards",
    "LeastRecentCohort",
    "McMahanShards",
    "NaturalPartition",
    "Normalize",
    "OortCohort",
    "Partition",
    "PartitionRule",
    "PartitionSummary",
    "Poison",
    "PoissonCohort",
    "Population",
    "PowerLawSizes",
    "PowerOfChoiceCohort",
    "QuarterTurns",
    "Reshape",
    "RoundRobinCohort",
    "SizedCohort",
    "Stretches",
    "Table",
    "Trigger",
    "UniformCohort",
    "check_sizes",
    "shards_of",
]
