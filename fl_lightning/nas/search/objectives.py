"""Scores of architectures that need no training: proxies of fresh networks, sizes, a table of truths.

An objective is any function from an architecture to a number, higher is better; one that evaluates
sub-networks of a trained supernet is used in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.core.seeds import derive_seed
from fl_lightning.nas.search.problem import Costs
from fl_lightning.nas.search.proxies import Proxy
from fl_lightning.nas.spaces.nas_bench_201_table import DataSet, NASBench201Table
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# makes a fresh network of an architecture
Build = Callable[[Architecture], nn.Module]


@final
@dataclass(frozen=True, eq=False)
class ProxyScore:
    """A proxy of a fresh network.

    Every network is drawn from the same seed, and sees the same batch.

    Attributes:
        proxy: of which.
        build: makes networks.
        images: a batch.
        labels: of it.
        seed: of the weights.
    """

    proxy: Proxy
    build: Build
    images: Tensor
    labels: Tensor
    seed: int = 0

    def __call__(self, architecture: Architecture) -> float:
        """Return the score."""
        devices = [] if self.images.device.type == "cpu" else [self.images.device]
        with torch.random.fork_rng(devices=devices):  # PyTorch's layers draw from the global one
            torch.manual_seed(derive_seed(self.seed, "proxy weights"))
            network = self.build(architecture).to(self.images.device)
        return self.proxy(network, self.images, self.labels)


@final
@dataclass(frozen=True)
class CostScore:
    """A cost as a score: larger networks are often better ones.

    Attributes:
        cost: of an architecture.
        measure: the name of the cost.
    """

    cost: Costs
    measure: str

    def __call__(self, architecture: Architecture) -> float:
        """Return the cost."""
        return self.cost(architecture)[self.measure]


@final
@dataclass(frozen=True, eq=False)
class TableScore:
    """The accuracy that a table of NAS-Bench-201 says.

    Attributes:
        table: of the benchmark.
        data_set: whose accuracy.
    """

    table: NASBench201Table
    data_set: DataSet = "cifar10"

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy in percent."""
        return self.table.lookup(architecture)[self.data_set]


def builder(space: SearchSpace, **options: Any) -> Build:
    """Return what makes the networks of a space.

    Args:
        space: of the architectures.
        options: of its `build`.
    """
    build: Callable[..., nn.Module] = space.build  # type: ignore[attr-defined]

    def make(architecture: Architecture) -> nn.Module:
        return build(architecture, **options)

    return make
