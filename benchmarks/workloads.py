"""What is measured: a network, and how much of which data its clients train on.

Everything is synthetic and from fixed seeds. Imports torch and NumPy only, because the rivals'
environments have nothing else: they train on the same tensors from the same initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks import networks

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A federation to simulate.

    Attributes:
        title: what the table says.
        network: builds the model.
        shape: of one example.
        num_classes: of the labels.
        num_clients: the population.
        examples: of the smallest and of the largest client; in between evenly on a log scale.
        cohort: clients of a round.
        batch_size: examples of a local step.
        local_steps: of a client in a round; one pass over its examples if None.
        lr: learning rate of the clients' SGD.
        momentum: of the clients' SGD.
        weight_decay: of the clients' SGD.
        pool: if given, all clients' examples are windows into so many, which overlap; otherwise
            every client owns its own.
        categories: values of the first columns of a row, which hold whole numbers.
        vocabulary: number of tokens, for examples that are texts; each token has a label.
    """

    title: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    examples: tuple[int, int]
    cohort: int
    batch_size: int
    local_steps: int | None = None
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    pool: int | None = None
    categories: tuple[int, ...] = ()
    vocabulary: int | None = None

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of examples of each client, shape (num_clients,)."""
        sizes = np.geomspace(*self.examples, self.num_clients).round().astype(np.int64)
        return np.random.default_rng(SEED).permutation(sizes)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each client's examples begin, shape (num_clients,)."""
        if self.pool is None:
            return np.cumsum(self.sizes) - self.sizes
        stride = 7  # less than a client's examples: neighbours share some
        return np.arange(self.num_clients) * stride % (self.pool - self.sizes + 1)

    def shard(self, client: int) -> slice:
        """Return where a client's examples are."""
        start = int(self.starts[client])
        return slice(start, start + int(self.sizes[client]))

    def steps_of(self, client: int) -> int:
        """Return the number of local steps of one client in a round."""
        return self.local_steps or -(-int(self.sizes[client]) // self.batch_size)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return all examples, shape (N, *shape), and their labels, shape (N,); (N, *shape) of texts."""
        count = self.pool or int(self.sizes.sum())
        generator = torch.Generator().manual_seed(SEED)
        if self.vocabulary is not None:
            size = 2, count, *self.shape
            x, y = torch.randint(self.vocabulary, size, generator=generator)
            return x, y
        x = torch.randn(count, *self.shape, generator=generator)
        for column, values in enumerate(self.categories):
            x[:, column] = torch.randint(values, (count,), generator=generator).float()
        return x, torch.randint(self.num_classes, (count,), generator=generator)

    def initial_network(self) -> nn.Module:
        """Return the network with the weights that every column starts from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.network()

    def scaled(self, factor: float) -> Workload:
        """Return the same workload with ``factor`` times the clients and the examples of each."""
        if factor == 1:
            return self
        cohort = max(2, round(self.cohort * factor))
        smallest, largest = (max(3, round(count * factor)) for count in self.examples)
        return replace(
            self,
            cohort=cohort,
            num_clients=max(cohort, round(self.num_clients * factor)),
            examples=(smallest, largest),
            pool=self.pool and max(100, round(self.pool * factor)),
        )


_letters = partial(networks.logistic_regression, 784, 62)
_digits = partial(networks.logistic_regression, 784, 10)
_cifar = Workload(
    title="CNN of pfl-research, 50 of 1,000 clients",
    network=partial(networks.pfl_cnn, dropout=False),
    shape=(3, 32, 32),
    num_classes=10,
    num_clients=1000,
    examples=(50, 50),
    cohort=50,
    batch_size=10,
)
_cifar100 = replace(
    _cifar, num_classes=100, num_clients=500, examples=(100, 100), cohort=2, local_steps=2
)
_cross_device = Workload(
    title="logistic regression, 200 of 10,000 clients",
    network=_letters,
    shape=(784,),
    num_classes=62,
    num_clients=10_000,
    examples=(20, 20),
    cohort=200,
    batch_size=20,
    lr=0.1,
    pool=60_000,
)
_unequal = Workload(
    title="logistic regression, 40 unequal clients",
    network=_digits,
    shape=(784,),
    num_classes=10,
    num_clients=40,
    examples=(44, 317),
    cohort=40,
    batch_size=10,
    momentum=0.9,
    weight_decay=1e-4,
)
_adult = 9, 16, 7, 15, 6, 5, 2, 42  # categories of the census of Adult (UCI), beside 6 numbers
_tabular = Workload(
    title="MLP with embeddings, 20 of 100 clients",
    network=partial(networks.TabularNetwork, _adult, 6, 8),
    shape=(14,),
    num_classes=2,
    num_clients=100,
    examples=(60, 180),
    cohort=20,
    batch_size=32,
    lr=0.05,
    categories=_adult,
)
_ratings = 6040, 3706  # users and films of MovieLens-1M

WORKLOADS = {
    "W3": _cross_device,
    "U-logreg": _unequal,
    "U-mlp": replace(_unequal, title="MLP, 40 unequal clients", network=networks.mlp),
    "U-lenet5": replace(
        _unequal,
        title="LeNet-5, 40 unequal clients",
        network=networks.lenet5,
        shape=(1, 32, 32),
    ),
    "E-cnn": replace(
        _cifar,
        title="CNN of FedJAX with dropout, 10 of 3,400 writers of EMNIST",
        network=partial(networks.pfl_cnn, dropout=True, channels=1, side=28, num_classes=62),
        shape=(1, 28, 28),
        num_classes=62,
        num_clients=3400,
        examples=(20, 400),
        cohort=10,
        batch_size=20,
        lr=0.03,
        pool=20_000,
    ),
    "W1-dropout": replace(
        _cifar, title=f"{_cifar.title}, dropout", network=partial(networks.pfl_cnn, dropout=True)
    ),
    "T-mlp": _tabular,
    "T-transformer": replace(
        _tabular,
        title="TabTransformer, 20 of 100 clients",
        network=partial(networks.TabularNetwork, _adult, 6, 32, 6),
    ),
    "L-lstm": Workload(
        title="LSTM, 10 of 715 roles of Shakespeare",
        network=networks.LetterNetwork,
        shape=(80,),
        num_classes=90,
        num_clients=715,
        examples=(4, 40),
        cohort=10,
        batch_size=4,
        lr=0.3,
        vocabulary=90,
    ),
    "L-lora": Workload(
        title="language model of 14 million parameters with LoRA, 2 of 100 clients, 4 local steps",
        network=networks.LowRankLanguageModel,
        shape=(64,),
        num_classes=50_304,
        num_clients=100,
        examples=(32, 32),
        cohort=2,
        batch_size=4,
        local_steps=4,
        vocabulary=50_304,
    ),
    "V-tiny": replace(
        _cifar100,
        title="ViT-tiny, 2 of 500 clients, 2 local steps",
        network=networks.tiny_vit,
        batch_size=32,
        momentum=0.9,
    ),
    "R-18": replace(
        _cifar100,
        title="ResNet-18 with group norm, 2 of 500 clients, 2 local steps",
        network=networks.resnet18_gn,
        batch_size=20,
    ),
    "W5": replace(
        _cross_device,
        title="logistic regression, 1,000 of 1,000,000 clients",
        num_clients=1_000_000,
        cohort=1000,
    ),
    "W1": _cifar,
    "W2": Workload(
        title="CNN of McMahan et al., 10 of 100 clients",
        network=networks.mcmahan_cnn,
        shape=(1, 28, 28),
        num_classes=10,
        num_clients=100,
        examples=(600, 600),
        cohort=10,
        batch_size=10,
    ),
    "U-lenet": replace(
        _unequal,
        title="wider LeNet, 40 unequal clients",
        network=networks.wide_lenet,
        shape=(3, 32, 32),
    ),
    "T-films": replace(
        _tabular,
        title="MLP over users and films of MovieLens-1M, 20 of 100 clients",
        network=partial(networks.TabularNetwork, _ratings, 0, 32),
        shape=(2,),
        categories=_ratings,
    ),
}
