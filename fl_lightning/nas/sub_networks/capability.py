"""Capabilities of clients: a budget for each client, and the largest sub-network within it.

    limit of a client = the largest sub-network within the client's budget   (`largest_within`)
    a client trains the sub-networks inside the limit, and holds the coordinates of all of them

A budget is in multiply-adds, parameters or activations, or in milliseconds on the client's device. A
relative budget is a multiple of the cost of the largest network.

A sub-network is inside the limit if none of its sizes is larger than in the limit. A network that is cheaper
but, for example, deeper than the limit is not inside.

`largest_within` starts from the smallest network, and repeatedly raises the size with the lowest position
among its options, as long as the network stays within the budget. So networks of different budgets have
similar shapes, rather than one deep and narrow, another wide and shallow.
Source of the setting: Diao et al. 2021 (HeteroFL). `largest_within` is our own rule.
"""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import run_seed, torch_generator
from fl_lightning.nas.cost.cost import Measure
from fl_lightning.nas.cost.latency import LatencyTable
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


@dataclass(frozen=True)
class CostOf:
    """Cost of an architecture in networks of one shape.

    Attributes:
        measure: ``flops``, ``params`` or ``activations``.
        side: side of the images, in pixels.
        in_channels: channels of the images.
        num_classes: number of classes.
    """

    measure: Measure = "flops"
    side: int = 32
    in_channels: int = 3
    num_classes: int = 10

    def __call__(self, architecture: Architecture) -> float:
        """Return the cost of an architecture."""
        space: Any = architecture.space
        shape = {"in_channels": self.in_channels, "num_classes": self.num_classes}
        return float(getattr(space.cost(architecture, side=self.side, **shape), self.measure))


class Capability(ABC):
    """Base of the assignments of budgets to clients."""

    measure: Measure
    relative: bool | None

    @abstractmethod
    def budgets(self, num_clients: int) -> list[float]:
        """Return the budget of every client.

        Raises:
            ConfigurationError: if the budget of a client is missing.
        """

    @abstractmethod
    def latencies(self, num_clients: int) -> list[str | None]:
        """Return the latency file of every client's device; None if its budget is in `measure`."""


@final
@dataclass(frozen=True)
class DeviceClasses(Capability):
    """Classes of devices, each with a budget and a share of the clients.

    Attributes:
        budgets_of_classes: budget of each class.
        shares: shares of the clients, which sum to 1; equal if None.
        measure: unit of budgets: ``flops``, ``params`` or ``activations``.
        relative: whether budgets are multiples of the cost of the largest network, or of its latency
            with `latency_files`. If None: multiples of the cost, and milliseconds with `latency_files`.
        latency_files: a file of ``fl-lightning latency`` for the device of each class; budgets are then
            in milliseconds, unless `relative` is true.
        seed: seed of the assignment of clients to classes; the run's seed if None.

    Example:
        >>> sorted(DeviceClasses([0.25, 1.0], [0.5, 0.5], seed=0).budgets(4))
        [0.25, 0.25, 1.0, 1.0]
    """

    budgets_of_classes: Sequence[float]
    shares: Sequence[float] | None = None
    measure: Measure = "flops"
    relative: bool | None = None
    latency_files: Sequence[str] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        budgets, shares = list(self.budgets_of_classes), self.shares
        if not budgets or not all(_is_budget(budget) for budget in budgets):
            raise ConfigurationError(
                f"budgets_of_classes must be finite numbers above 0, one a class, got {budgets}"
            )
        if shares is not None and not (
            len(shares) == len(budgets) and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6
        ):
            raise ConfigurationError(
                f"shares must be {len(budgets)} numbers from 0, one a class, that sum to 1, got "
                f"{list(shares)}"
            )
        files = self.latency_files
        if files is not None and len(files) != len(budgets):
            raise ConfigurationError(
                f"latency_files must be {len(budgets)} files, one a class, got {list(files)}"
            )
        if self.relative is None:
            object.__setattr__(self, "relative", files is None)

    def budgets(self, num_clients: int) -> list[float]:
        """Return the budget of every client; classes have their shares to within one client."""
        return [float(self.budgets_of_classes[number]) for number in self._classes(num_clients)]

    def latencies(self, num_clients: int) -> list[str | None]:
        """Return the file of every client's class."""
        files = self.latency_files
        return [None if files is None else files[number] for number in self._classes(num_clients)]

    def _classes(self, num_clients: int) -> list[int]:
        """Return the number of every client's class."""
        number = len(self.budgets_of_classes)
        shares = [1 / number] * number if self.shares is None else self.shares
        ends = [round(num_clients * share) for share in accumulate(shares)]
        generator = torch_generator(run_seed(self.seed), "capability")
        order = torch.randperm(num_clients, generator=generator)
        classes: list[int] = torch.bucketize(order, torch.tensor(ends[:-1]), right=True).tolist()
        return classes


@final
@dataclass(frozen=True)
class BudgetTable(Capability):
    """A budget for every client, from a CSV file with the columns ``client`` and ``budget``.

    A third column, ``latency``, may name a file of ``fl-lightning latency`` for each client's device: the
    client's budget is then in milliseconds.

    Attributes:
        path: path of the file; clients are numbered from 0.
        measure: unit of other budgets: ``flops``, ``params`` or ``activations``.
        relative: whether budgets are multiples of the cost of the largest network, or of its latency.
    """

    path: str
    measure: Measure = "flops"
    relative: bool = False

    def budgets(self, num_clients: int) -> list[float]:
        """Return the budget of every client."""
        return [budget for budget, _ in self._rows(num_clients)]

    def latencies(self, num_clients: int) -> list[str | None]:
        """Return the latency file of every client, from the third column; None if it is empty."""
        return [file for _, file in self._rows(num_clients)]

    def _rows(self, num_clients: int) -> list[tuple[float, str | None]]:
        """Return budget and latency file of every client."""
        try:
            with Path(self.path).open(newline="") as file:
                rows = list(csv.DictReader(file))
            found = {
                int(row["client"]): (float(row["budget"]), row.get("latency") or None)
                for row in rows
            }
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"budgets {self.path}: {error!r}; the file must be a CSV with the columns client "
                "(whole numbers from 0) and budget (numbers)"
            ) from error
        missing = [client for client in range(num_clients) if client not in found]
        if missing:
            raise ConfigurationError(
                f"budgets {self.path}: no budget for client {missing[0]}; there are {num_clients}"
            )
        broken = [client for client, (budget, _) in found.items() if not _is_budget(budget)]
        if broken:
            raise ConfigurationError(
                f"budgets {self.path}: a budget must be a finite number above 0, and that of client "
                f"{broken[0]} is {found[broken[0]][0]:g}"
            )
        return [found[client] for client in range(num_clients)]


def limits(
    capability: Capability, space: SizeSpace, cost: CostOf, num_clients: int
) -> list[Architecture]:
    """Return the largest sub-network that each client can afford.

    Raises:
        ConfigurationError: if a client cannot afford the smallest, or a latency file is for other networks.
    """
    files = capability.latencies(num_clients)
    wanted = list(zip(files, capability.budgets(num_clients), strict=True))
    costs = {file: _cost_on(file, space, cost) for file in dict.fromkeys(files)}

    def limit(file: str | None, budget: float) -> Architecture:
        unit = costs[file](space.largest) if capability.relative else 1.0
        return largest_within(space, costs[file], budget * unit)

    found = {pair: limit(*pair) for pair in dict.fromkeys(wanted)}
    return [found[pair] for pair in wanted]


def _cost_on(file: str | None, space: SizeSpace, cost: CostOf) -> Callable[[Architecture], float]:
    """Return the function for a network's milliseconds on a device, or for its cost without a file."""
    if file is None:
        return cost
    table = LatencyTable.read(file)
    shape = {"in_channels": cost.in_channels, "num_classes": cost.num_classes}
    table.check(space, cost.side, shape)
    return table.milliseconds


def within(architecture: Architecture, limit: Architecture) -> Architecture:
    """Return an architecture with every size reduced to at most the size in the limit.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> within(space.largest, space.smallest) == space.smallest
        True
    """
    pairs = zip(architecture.choices, limit.choices, strict=True)
    return architecture.space.architecture([min(pair) for pair in pairs])


def reach(space: SizeSpace, supernet: nn.Module, limit: Architecture) -> dict[str, Tensor]:
    """Return the mask of all coordinates that sub-networks inside a limit hold, bool by parameter name.

    The limit alone is not enough: a smaller kernel is computed from a larger one by a matrix that only
    networks with the smaller kernel hold. So the result is the union over the limit and the networks with
    one kind of size lowered to each of its options.
    """
    masks = space.held(supernet, limit)
    kinds = {size.name: len(size.options) for _, size in space.named_sizes}
    for kind, number in kinds.items():
        for most in range(number - 1):
            lowered = [
                min(choice, most) if size.name == kind else choice
                for choice, (_, size) in zip(limit.choices, space.named_sizes, strict=True)
            ]
            architecture = space.architecture(lowered)
            if architecture != limit:
                for name, mask in space.held(supernet, architecture).items():
                    masks[name] |= mask
    return masks


def _is_budget(value: float) -> bool:
    return 0 < value < math.inf


def largest_within(
    space: SizeSpace, cost: Callable[[Architecture], float], budget: float
) -> Architecture:
    """Return a sub-network within a budget, grown until no size can be raised.

    Args:
        space: space of sizes.
        cost: cost of an architecture; must not fall when a size is raised.
        budget: budget in the unit of the cost.

    Raises:
        ConfigurationError: if the smallest sub-network is over the budget.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> str(largest_within(space, lambda network: space.cost(network).flops, 8e6))
        'w0.75:e0.5-e0.25|w0.75:e0.25|w0.75:e0.25|w0.5:e0.25'
    """
    best = space.smallest
    if cost(best) > budget:
        raise ConfigurationError(
            f"no network of {space.name} is within {budget:,.10g}: the smallest, {best}, "
            f"costs {cost(best):,.10g}"
        )
    if cost(space.largest) <= budget:
        return space.largest
    full: set[int] = set()  # decisions that cannot be raised, now or later
    while True:
        candidates = [index for index in _raisable(space, best) if index not in full]
        if not candidates:
            return best
        index = min(candidates, key=lambda index: _level(best, index))
        raised = _moved(best, index, 1)
        if cost(raised) <= budget:
            best = raised
        else:
            full.add(index)


def _raisable(space: SizeSpace, architecture: Architecture) -> list[int]:
    active = space.active(architecture.choices)
    rows = zip(architecture.choices, space.decisions, active, strict=True)
    return [
        index
        for index, (choice, decision, on) in enumerate(rows)
        if on and choice + 1 < len(decision.options)
    ]


def _level(architecture: Architecture, index: int) -> float:
    """Position of a size among its options, in [0, 1]."""
    return architecture.choices[index] / (len(architecture.space.decisions[index].options) - 1)


def _moved(architecture: Architecture, index: int, by: int) -> Architecture:
    choices = list(architecture.choices)
    choices[index] += by
    return architecture.space.architecture(choices)
