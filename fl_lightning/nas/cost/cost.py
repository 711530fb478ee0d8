"""Cost of an architecture of any space.

In a space of cells a table holds the cost of every operation on every edge. Sums give exact costs:

    cost(cell) = fixed + Σ_rows cost[row, operation on it]
    E[cost]    = fixed + Σ_rows Σ_operations p[row, operation] · cost[row, operation]

The expectation is differentiable in p, so hardware-aware searches add it to their loss. The cost of a row
is summed over all cells of the network that repeat the edge, at their channels and image sizes.
Source of the expectation: Cai et al. 2019, ProxylessNAS, section 3.3; Wu et al. 2019, FBNet, eq. 7.

A penalty adds the expected cost to the loss of α:

    E = expected cost, Σ p · F,   r = reference,   CE = the task's loss

    log          CE · α (log E / log r)^β     r = e:   Wu et al. 2019, FBNet, section 3.2
                                              else:    Cai et al. 2019, ProxylessNAS, its code (mul#log)
    linear       CE + λ (E - r) / r           Cai et al. 2019, ProxylessNAS, its code (add#linear)
    absolute     CE + λ |E - r| / r           Bender et al. 2020, TuNAS

``log`` and ``linear`` always push the cost down; ``absolute`` pushes it towards the reference. The logarithm
needs a cost above 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.nas.cost.count import Cost, count
from fl_lightning.nas.spaces.cells import Candidate, CellSpace, FixedEdge
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace


def of(
    space: SearchSpace,
    architecture: Architecture,
    *,
    side: int = 32,
    in_channels: int = 3,
    num_classes: int = 10,
    **options: Any,
) -> Cost:
    """Exact cost of an architecture's network for one image.

    For cells the cost is a sum over the space's cost table, for sizes a sum over blocks. For other spaces the
    network is built on the meta device and counted.

    Args:
        space: space of the architecture.
        architecture: the architecture.
        side: height and width of the images, in pixels.
        in_channels: channels of the images.
        num_classes: number of classes.
        options: options of the space's `build`, e.g. ``channels`` and ``cells``.

    Raises:
        ConfigurationError: if the architecture is of another space.

    Example:
        >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
        >>> space = NASBench201()
        >>> of(space, space.architecture([3] * 6)).flops
        220119690
    """
    if architecture.space != space:
        raise ConfigurationError(
            f"an architecture of {architecture.space.name} has no cost in {space.name}"
        )
    shape = {"in_channels": in_channels, "num_classes": num_classes, **options}
    if isinstance(space, SizeSpace):
        return space.cost(architecture, side=side, **shape)
    if isinstance(space, CellSpace):
        return cost_table(space, side=side, **shape).of(space.operations_of(architecture))
    return built_cost(space, architecture, side=side, **shape)


def built_cost(space: Any, architecture: Architecture, *, side: int, **options: Any) -> Cost:
    """Cost of an architecture for one image, counted on a network built on the meta device.

    Args:
        space: space of the architecture.
        architecture: the architecture.
        side: height and width of the images, in pixels.
        options: options of the space's `build`, including ``in_channels``.
    """
    with torch.device("meta"):
        network = space.build(architecture, **options)
        return count(network, torch.empty(1, options["in_channels"], side, side))


Measure = Literal["flops", "params", "activations"]
MEASURES: tuple[Measure, ...] = ("flops", "params", "activations")


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of the operations of a space, in networks of one shape; `cost_table` makes one.

    Attributes:
        fixed: cost of everything except the choices.
        flops: multiply-adds of each operation, integers of shape (num_rows, num_operations).
        params: number of parameters of each operation, same shape.
        activations: number of activations of each operation, same shape.
    """

    fixed: Cost
    flops: Tensor
    params: Tensor
    activations: Tensor

    def of(self, operations: Sequence[int]) -> Cost:
        """Return the cost of a network with given operations on the rows (`operations_of`)."""
        rows = range(len(operations))
        sums = (int(getattr(self, name)[rows, list(operations)].sum()) for name in MEASURES)
        return self.fixed + Cost(*sums)

    def expected(self, probabilities: Tensor, measure: Measure = "flops") -> Tensor:
        """Return the expected cost if each row draws an operation independently, a scalar.

        Args:
            probabilities: shape (num_rows, num_operations); gradients flow.
            measure: ``flops``, ``params`` or ``activations``.
        """
        costs = getattr(self, measure).to(probabilities)
        expectation: Tensor = getattr(self.fixed, measure) + (probabilities * costs).sum()
        return expectation


@lru_cache(maxsize=64)
def cost_table(
    space: CellSpace,
    *,
    side: int = 32,
    in_channels: int = 3,
    num_classes: int = 10,
    channels: int | None = None,
    cells: int | None = None,
) -> CostTable:
    """Count the cost of each operation on each row, and of the rest of the network, for one image.

    Only shapes are computed, on the meta device.

    Args:
        space: space of cells.
        side: height and width of the images, in pixels.
        in_channels: channels of the images.
        num_classes: number of classes.
        channels: channels of the first cells; the default of the space's `network` if None.
        cells: number of cells; the default of the space's `network` if None.

    Raises:
        ConfigurationError: if a number is not positive.
    """
    shape = {"channels": channels, "cells": cells}
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    shape_of_all = {"in_channels": in_channels, "num_classes": num_classes, **given}
    for name, value in {"side": side, **shape_of_all}.items():
        check_range(name, value, "at least 1")
    flows: list[_Flow] = []

    def make_edge(row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module:
        edge = FixedEdge(candidates[0](*sizes))
        edge.register_forward_pre_hook(
            lambda _, inputs: flows.append((row, candidates, sizes, inputs[0]))
        )
        return edge

    with torch.device("meta"):
        network = space.network(make_edge, **shape_of_all)
        whole = count(network, torch.empty(1, in_channels, side, side))
        return _table(space, whole, flows)


# row, candidates, sizes of the edge (channels in, channels out, stride), input
_Flow = tuple[int, Sequence[Candidate], tuple[int, ...], Any]


def _table(space: CellSpace, whole: Cost, flows: Sequence[_Flow]) -> CostTable:
    """Return the table of a network whose edges have their first candidates, from its cost and inputs."""
    sums = torch.zeros(
        len(MEASURES), space.num_rows, len(space.operations), dtype=torch.int64, device="cpu"
    )
    rest = torch.tensor(astuple(whole), device="cpu")
    known: dict[tuple[Any, ...], Tensor] = {}
    for row, candidates, sizes, x in flows:
        for number, candidate in enumerate(candidates):
            key = candidate, sizes, tuple(tensor.shape for tensor in tree_leaves(x))
            if key not in known:
                known[key] = torch.tensor(astuple(count(candidate(*sizes), x)), device="cpu")
            if number == 0:
                rest -= known[key]
            if number != space.none:  # an edge that is left out costs nothing
                sums[:, row, number] += known[key]
    return CostTable(Cost(*rest.tolist()), *sums)


class Penalty(ABC):
    """Base of the losses of α that combine the loss of the task and the expected cost."""

    @abstractmethod
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss of α.

        Args:
            loss: loss of the task, a scalar; gradients flow.
            cost: expected cost, a scalar in the unit of the reference; gradients flow.
        """


@final
@dataclass(frozen=True)
class LogPenalty(Penalty):
    """CE · α (log E / log r)^β, with the settings of FBNet; ProxylessNAS sets r and an exponent of 0.3.

    Attributes:
        reference: r > 1.
        scale: α > 0.
        exponent: β >= 0.

    Raises:
        ConfigurationError: if a setting is out of range.
    """

    reference: float = math.e
    scale: float = 0.2
    exponent: float = 0.6

    def __post_init__(self) -> None:
        check_range("reference of the penalty", self.reference, "above 1 and finite")
        check_range("scale of the penalty", self.scale, "above 0 and finite")
        check_range("exponent of the penalty", self.exponent, "at least 0 and finite")

    @override
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        if not cost > 1:
            raise ValueError(
                f"the logarithm of the cost needs an expected cost above 1, got {float(cost)}: give costs "
                "in a smaller unit, or take a linear or absolute penalty"
            )
        return loss * self.scale * (cost.log() / math.log(self.reference)) ** self.exponent


@final
@dataclass(frozen=True)
class LinearPenalty(Penalty):
    """CE + λ (E - r) / r, or with ``absolute`` TuNAS's CE + λ |E - r| / r.

    Attributes:
        reference: r > 0, in the unit of the cost; with ``absolute`` the target.
        weight: λ >= 0.
        absolute: whether costs below the reference are penalised like costs above it.

    Raises:
        ConfigurationError: if a setting is out of range.
    """

    reference: float
    weight: float = 0.1
    absolute: bool = False

    def __post_init__(self) -> None:
        check_range("reference of the penalty", self.reference, "above 0 and finite")
        check_range("weight of the penalty", self.weight, "at least 0 and finite")

    @override
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        excess = (cost - self.reference) / self.reference
        return loss + self.weight * (excess.abs() if self.absolute else excess)
