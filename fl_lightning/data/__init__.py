"""Floor 1: whose examples are whose, and who takes part in a round."""

from fl_lightning.data.availability import Availability, AvailableCohort, Diurnal, Stretches
from fl_lightning.data.cohort import AllClients, CohortSampler, PoissonCohort, UniformCohort
from fl_lightning.data.digits import Digits
from fl_lightning.data.dirichlet_labels import DirichletPerClass, DirichletPerClient
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.flat_shards import FlatShards
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.images import ImageTensors
from fl_lightning.data.inputs import FederatedNormalize, InputTransform, Normalize, Reshape
from fl_lightning.data.iris import Iris
from fl_lightning.data.label_shards import LabelShards
from fl_lightning.data.mcmahan_shards import McMahanShards
from fl_lightning.data.oort import OortCohort
from fl_lightning.data.partition import IID, NaturalPartition, Partition
from fl_lightning.data.poisoning import LabelFlip, Poison, Trigger
from fl_lightning.data.population import Population
from fl_lightning.data.quantity_skew import DirichletSizes, PowerLawSizes
from fl_lightning.data.summary import PartitionSummary
from fl_lightning.data.torchvision_sources import CIFAR10, CIFAR100, MNIST, FashionMNIST
from fl_lightning.data.turns import LeastRecentCohort, RoundRobinCohort
from fl_lightning.data.weighted_cohorts import ByLossCohort, BySizeCohort, PowerOfChoiceCohort

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "MNIST",
    "AllClients",
    "Availability",
    "AvailableCohort",
    "ByLossCohort",
    "BySizeCohort",
    "CohortSampler",
    "Digits",
    "DirichletPerClass",
    "DirichletPerClient",
    "DirichletSizes",
    "Diurnal",
    "FashionMNIST",
    "FederatedDataModule",
    "FederatedNormalize",
    "FlatShards",
    "ImageFolder",
    "ImageTensors",
    "InputTransform",
    "Iris",
    "LabelFlip",
    "LabelShards",
    "LeastRecentCohort",
    "McMahanShards",
    "NaturalPartition",
    "Normalize",
    "OortCohort",
    "Partition",
    "PartitionSummary",
    "Poison",
    "PoissonCohort",
    "Population",
    "PowerLawSizes",
    "PowerOfChoiceCohort",
    "Reshape",
    "RoundRobinCohort",
    "Stretches",
    "Trigger",
    "UniformCohort",
]
