"""What a client can afford: the largest sub-network within its budget, and drawn ones made to fit.

Growing from the smallest, the size that lags most behind its options is raised first, as long as
the result fits; the end is a network of which no size can be raised. Budgets that rise give
networks that are alike in shape, rather than one deep and narrow, the other wide and shallow.
Source of the setting: Diao et al. 2021 (HeteroFL); the rule is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture

# what an architecture costs: FLOPs, parameters, milliseconds
Measure = Callable[[Architecture], float]


def largest_within(space: SizeSpace, cost: Measure, budget: float) -> Architecture:
    """Return a sub-network within a budget of which no size can be raised.

    Args:
        space: of sizes.
        cost: of an architecture; it must not fall when a size is raised.
        budget: in the same unit.

    Raises:
        ConfigurationError: if the smallest sub-network costs more.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> str(largest_within(space, lambda network: space.cost(network).flops, 8e6))
        'w0.75:e0.5-e0.25|w0.75:e0.25|w0.75:e0.25|w0.5:e0.25'
    """
    best = space.smallest
    _check(space, cost(best), budget)
    if cost(space.largest) <= budget:
        return space.largest
    full: set[int] = set()  # decisions that do not fit one more: nor will they later
    while True:
        candidates = [index for index in _raisable(best) if index not in full]
        if not candidates:
            return best
        index = min(candidates, key=lambda index: _level(best, index))
        raised = _moved(best, index, 1)
        if cost(raised) <= budget:
            best = raised
        else:
            full.add(index)


def fit(
    architecture: Architecture, cost: Measure, budget: float, generator: torch.Generator
) -> Architecture:
    """Return a sub-network within a budget: sizes drawn one by one are lowered until it fits.

    Args:
        architecture: of a space of sizes; returned as it is if it fits.
        cost: of an architecture.
        budget: in the same unit.
        generator: of the step.

    Raises:
        ConfigurationError: if the smallest sub-network costs more.
    """
    space = _space(architecture)
    _check(space, cost(space.smallest), budget)
    while cost(architecture) > budget:
        lowerable = [index for index, choice in enumerate(architecture.choices) if choice > 0]
        drawn = int(torch.randint(len(lowerable), (), generator=generator))
        architecture = _moved(architecture, lowerable[drawn], -1)
    return architecture


def _space(architecture: Architecture) -> SizeSpace:
    space = architecture.space
    if not isinstance(space, SizeSpace):
        raise ConfigurationError(f"{space.name} is no space of sizes: there is no smaller network")
    return space


def _check(space: SizeSpace, smallest: float, budget: float) -> None:
    if smallest > budget:
        raise ConfigurationError(
            f"no network of {space.name} is within {budget:,.10g}: the smallest, {space.smallest}, "
            f"costs {smallest:,.10g}"
        )


def _raisable(architecture: Architecture) -> list[int]:
    space = _space(architecture)
    active = space.active(architecture.choices)
    rows = zip(architecture.choices, space.decisions, active, strict=True)
    return [
        index
        for index, (choice, decision, on) in enumerate(rows)
        if on and choice + 1 < len(decision.options)
    ]


def _level(architecture: Architecture, index: int) -> float:
    """How far up its options a size is, in [0, 1]."""
    return architecture.choices[index] / (len(architecture.space.decisions[index].options) - 1)


def _moved(architecture: Architecture, index: int, by: int) -> Architecture:
    choices = list(architecture.choices)
    choices[index] += by
    return architecture.space.architecture(choices)
