"""Data: sources, partitions of their examples over clients, and cohorts of clients."""

from fl_lightning.core.kinds import exports
from fl_lightning.data.client_examples import ExampleTransform as ExampleTransform
from fl_lightning.data.client_examples import LabelPermutation as LabelPermutation
from fl_lightning.data.client_examples import QuarterTurns as QuarterTurns
from fl_lightning.data.cohorts.availability import Availability as Availability
from fl_lightning.data.cohorts.availability import AvailableCohort as AvailableCohort
from fl_lightning.data.cohorts.availability import Diurnal as Diurnal
from fl_lightning.data.cohorts.availability import Stretches as Stretches
from fl_lightning.data.cohorts.cohort import AllClients as AllClients
from fl_lightning.data.cohorts.cohort import Cohort as Cohort
from fl_lightning.data.cohorts.cohort import PoissonCohort as PoissonCohort
from fl_lightning.data.cohorts.cohort import SizedCohort as SizedCohort
from fl_lightning.data.cohorts.cohort import UniformCohort as UniformCohort
from fl_lightning.data.cohorts.oort import OortCohort as OortCohort
from fl_lightning.data.cohorts.population import ClientIds as ClientIds
from fl_lightning.data.cohorts.population import Population as Population
from fl_lightning.data.cohorts.weighted_cohorts import ByLossCohort as ByLossCohort
from fl_lightning.data.cohorts.weighted_cohorts import BySizeCohort as BySizeCohort
from fl_lightning.data.cohorts.weighted_cohorts import LeastRecentCohort as LeastRecentCohort
from fl_lightning.data.cohorts.weighted_cohorts import PowerOfChoiceCohort as PowerOfChoiceCohort
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort as RoundRobinCohort
from fl_lightning.data.federated import FederatedDataModule as FederatedDataModule
from fl_lightning.data.inputs import FederatedNormalize as FederatedNormalize
from fl_lightning.data.inputs import InputTransform as InputTransform
from fl_lightning.data.inputs import Normalize as Normalize
from fl_lightning.data.inputs import Reshape as Reshape
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClass as DirichletPerClass
from fl_lightning.data.partitions.dirichlet_labels import DirichletPerClient as DirichletPerClient
from fl_lightning.data.partitions.flat_shards import FlatShards as FlatShards
from fl_lightning.data.partitions.label_shards import LabelShards as LabelShards
from fl_lightning.data.partitions.label_shards import McMahanShards as McMahanShards
from fl_lightning.data.partitions.partition import IID as IID
from fl_lightning.data.partitions.partition import NaturalPartition as NaturalPartition
from fl_lightning.data.partitions.partition import Partition as Partition
from fl_lightning.data.partitions.partition import check_sizes as check_sizes
from fl_lightning.data.partitions.partition import shards_of as shards_of
from fl_lightning.data.partitions.quantity_skew import DirichletSizes as DirichletSizes
from fl_lightning.data.partitions.quantity_skew import PowerLawSizes as PowerLawSizes
from fl_lightning.data.poisoning import LabelFlip as LabelFlip
from fl_lightning.data.poisoning import Poison as Poison
from fl_lightning.data.poisoning import Trigger as Trigger
from fl_lightning.data.sources.arrays import Arrays as Arrays
from fl_lightning.data.sources.completions import Completions as Completions
from fl_lightning.data.sources.hugging_face import HuggingFace as HuggingFace
from fl_lightning.data.sources.image_folder import ImageFolder as ImageFolder
from fl_lightning.data.sources.image_source import ImageTensors as ImageTensors
from fl_lightning.data.sources.known_sets import CIFAR10 as CIFAR10
from fl_lightning.data.sources.known_sets import CIFAR100 as CIFAR100
from fl_lightning.data.sources.known_sets import MNIST as MNIST
from fl_lightning.data.sources.known_sets import Digits as Digits
from fl_lightning.data.sources.known_sets import FashionMNIST as FashionMNIST
from fl_lightning.data.sources.known_sets import Iris as Iris
from fl_lightning.data.sources.table import Table as Table
from fl_lightning.data.summary import PartitionSummary as PartitionSummary

__all__ = list(exports(__file__, globals()))
