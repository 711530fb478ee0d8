"""Budgets of clients' devices, and the largest sub-network that each client can afford.

    limit of a client = the largest sub-network within the client's budget   (`largest_within`)
    a client trains the sub-networks inside its limit, and updates the coordinates of all of them

A budget is in multiply-adds, parameters or activations, or in milliseconds on the client's device. A
relative budget is a multiple of the cost of the largest network.

A sub-network is inside the limit if none of its sizes is larger than in the limit. A network that is cheaper
but, for example, deeper than the limit is not inside.

`largest_within` starts from the smallest network. It repeatedly raises the size that is lowest among its
options, as long as the network stays within the budget. So networks of different budgets have similar shapes,
rather than one deep and narrow, another wide and shallow.
Source of the setting: Diao et al. 2021 (HeteroFL). `largest_within` is our own rule.
"""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import run_seed, torch_generator
from fl_lightning.nas.cost.count import Measure
from fl_lightning.nas.cost.latency import LatencyTable
from fl_lightning.nas.spaces.sizes import SizedNetwork, SizeSpace
from fl_lightning.nas.spaces.space import Architecture, Networks


class Budget(NamedTuple):
    """A client's compute budget: upper bound on the cost of the networks it trains.

    Attributes:
        amount: largest cost: in the measure of the capability, or in milliseconds with a latency file.
        latency_file: path of a file of ``fl-lightning latency`` for the client's device.
    """

    amount: float
    latency_file: str | None = None


class Capability(ABC):
    """Base of the ways to give each client a compute budget."""

    measure: Measure
    relative: bool | None

    @abstractmethod
    def budgets(self, num_clients: int) -> list[Budget]:
        """Return each client's compute budget, by client number.

        Raises:
            ConfigurationError: if the budget of a client is missing.
        """


@final
@dataclass(frozen=True)
class DeviceClasses(Capability):
    """Compute budgets by device class: each client is assigned to a class at random.

    Attributes:
        budgets_of_classes: budget of every class.
        shares: fraction of the clients in every class; they sum to 1. Equal fractions if None.
        measure: cost that budgets bound: ``flops``, ``params`` or ``activations``.
        relative: whether budgets are multiples of the cost of the largest network, or of its latency
            with `latency_files`. If None: multiples of the cost, and milliseconds with `latency_files`.
        latency_files: path of a file of ``fl-lightning latency`` for the device of every class; budgets are
            then in milliseconds, unless `relative` is true.
        seed: seed of the assignment of clients to classes; the run's seed if None.

    Example:
        >>> sorted(DeviceClasses([0.25, 1.0], [0.5, 0.5], seed=0).budgets(2))
        [Budget(amount=0.25, latency_file=None), Budget(amount=1.0, latency_file=None)]
    """

    budgets_of_classes: Sequence[float]
    shares: Sequence[float] | None = None
    measure: Measure = "flops"
    relative: bool | None = None
    latency_files: Sequence[str] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        budgets, shares = list(self.budgets_of_classes), self.shares
        if not budgets or not all(0 < budget < math.inf for budget in budgets):
            raise ConfigurationError(
                f"budgets_of_classes must be one number per class, above 0 and finite, got {budgets}"
            )
        if shares is not None and not (
            len(shares) == len(budgets) and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6
        ):
            raise ConfigurationError(
                f"shares must be {len(budgets)} numbers of at least 0, one per class, that sum to 1, got "
                f"{list(shares)}"
            )
        files = self.latency_files
        if files is not None and len(files) != len(budgets):
            raise ConfigurationError(
                f"latency_files must be {len(budgets)} paths, one per class, got {list(files)}"
            )
        if self.relative is None:
            object.__setattr__(self, "relative", files is None)

    def budgets(self, num_clients: int) -> list[Budget]:
        """Return each client's budget; sizes of device classes differ from their shares by at most one client."""
        amounts = self.budgets_of_classes
        files: Sequence[str | None] = self.latency_files or [None] * len(amounts)
        pairs = zip(amounts, files, strict=True)
        classes = [Budget(float(amount), file) for amount, file in pairs]
        shares = self.shares or [1 / len(classes)] * len(classes)
        ends = [round(num_clients * share) for share in accumulate(shares)]
        generator = torch_generator(run_seed(self.seed), "capability")
        order = torch.randperm(num_clients, generator=generator)
        numbers: list[int] = torch.bucketize(order, torch.tensor(ends[:-1]), right=True).tolist()
        return [classes[number] for number in numbers]


@final
@dataclass(frozen=True)
class BudgetTable(Capability):
    """Compute budgets from a CSV file with the columns ``client`` and ``budget``.

    A third column, ``latency``, may name a file of ``fl-lightning latency`` for the client's device: the
    client's budget is then in milliseconds.

    Attributes:
        path: path of the file; clients are numbered from 0.
        measure: cost that other budgets bound: ``flops``, ``params`` or ``activations``.
        relative: whether budgets are multiples of the cost of the largest network, or of its latency.
    """

    path: str
    measure: Measure = "flops"
    relative: bool = False

    @override
    def budgets(self, num_clients: int) -> list[Budget]:
        try:
            with Path(self.path).open(newline="") as file:
                found = {
                    int(row["client"]): Budget(float(row["budget"]), row.get("latency") or None)
                    for row in csv.DictReader(file)
                }
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"budgets {self.path}: {type(error).__name__} {error}; the file must be a CSV with the columns client "
                "(whole numbers from 0) and budget (numbers)"
            ) from error
        missing = [client for client in range(num_clients) if client not in found]
        if missing:
            raise ConfigurationError(
                f"budgets {self.path}: there is no row for client {missing[0]}: give one for each of the "
                f"{num_clients} clients, 0 to {num_clients - 1}"
            )
        broken = [client for client, own in found.items() if not 0 < own.amount < math.inf]
        if broken:
            raise ConfigurationError(
                f"budgets {self.path}: a budget must be above 0 and finite, and that of client {broken[0]} is "
                f"{found[broken[0]].amount:g}"
            )
        return [found[client] for client in range(num_clients)]


def limits(capability: Capability, networks: Networks, num_clients: int) -> list[Architecture]:
    """Return, for each client, the largest sub-network that its compute budget allows.

    Raises:
        ConfigurationError: if a client cannot afford the smallest, or a latency file is for other networks.
    """
    space: Any = networks.space

    def counted(architecture: Architecture) -> float:
        return float(getattr(networks.cost(architecture), capability.measure))

    def on_device(file: str | None) -> Callable[[Architecture], float]:
        if file is None:
            return counted
        table = LatencyTable.read(file)
        table.check(networks)
        return table.milliseconds

    @cache
    def limit(budget: Budget) -> Architecture:
        cost = on_device(budget.latency_file)
        unit = cost(space.largest) if capability.relative else 1.0
        return largest_within(space, cost, budget.amount * unit)

    return [limit(budget) for budget in capability.budgets(num_clients)]


def affordable(networks: Networks, most: Mapping[str, float]) -> Architecture:
    """Return the largest sub-network whose cost is within bounds on several measures.

    Args:
        networks: networks of a space of sizes.
        most: bounds by measure: ``flops``, ``params``, ``activations``.

    Raises:
        ConfigurationError: if the smallest sub-network costs more.
    """
    space: Any = networks.space

    def part(architecture: Architecture) -> float:
        cost = networks.cost(architecture)
        return float(max(getattr(cost, measure) / limit for measure, limit in most.items()))

    if part(space.smallest) > 1:
        raise ConfigurationError(
            f"no network of {space.name} is within {dict(most)}: the smallest, {space.smallest}, has "
            f"{networks.cost(space.smallest)}"
        )
    return largest_within(space, part, 1.0)


def within(architecture: Architecture, limit: Architecture) -> Architecture:
    """Cut an architecture to a limit: reduce each size to at most that of the limit's architecture.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> within(space.largest, space.smallest) == space.smallest
        True
    """
    pairs = zip(architecture.choices, limit.choices, strict=True)
    return architecture.space.architecture([min(pair) for pair in pairs])


def reach(space: SizeSpace, supernet: SizedNetwork, limit: Architecture) -> dict[str, Tensor]:
    """Return masks of all coordinates that a client's sub-networks within its limit use, bool by parameter name.

    The limit does not use all of them: a smaller kernel is computed from a larger one by a matrix that only
    networks with the smaller kernel use. So the result is the union over the limit and the networks with one
    kind of size lowered to each of its options.
    """
    masks = space.held(supernet, limit)
    for kind, number in space.most_options.items():
        for most in range(number - 1):
            pairs = zip(limit.choices, space.kinds, strict=True)
            lowered = [min(choice, most) if own == kind else choice for choice, own in pairs]
            architecture = space.architecture(lowered)
            if architecture != limit:
                for name, mask in space.held(supernet, architecture).items():
                    masks[name] |= mask
    return masks


def largest_within(
    space: SizeSpace, cost: Callable[[Architecture], float], budget: float
) -> Architecture:
    """Return a sub-network within a cost budget, such that raising any single size would exceed the budget.

    Args:
        space: space of sizes.
        cost: returns the cost of an architecture, which must not fall when a size is raised.
        budget: largest cost.

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
    ends = space.largest.choices
    while True:
        active = space.active(best.choices)
        open_ = [
            index
            for index, (choice, end) in enumerate(zip(best.choices, ends, strict=True))
            if active[index] and choice < end and index not in full
        ]
        if not open_:
            return best
        choices = list(best.choices)
        lowest = min(open_, key=lambda index: choices[index] / ends[index])  # among its options
        choices[lowest] += 1
        raised = space.architecture(choices)
        if cost(raised) <= budget:
            best = raised
        else:
            full.add(lowest)
