"""Penalties: the expected cost of a network in the loss of α.

    E = expected cost, Σ p · F,   r = reference,   CE = the task's loss

    mul#log      CE · α (log E / log r)^β          Cai et al. 2019, ProxylessNAS, its code
    add#linear   CE + λ (E - r) / r                Cai et al. 2019, ProxylessNAS, its code
    mul log      CE · α (log E)^β                  Wu et al. 2019, FBNet, section 3.2
    absolute     CE + β |E / r - 1|                Bender et al. 2020, TuNAS

The first three always reduce the cost; the last one moves it towards the reference. Logarithms need costs
above 1: choose a suitable unit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError


class Penalty(ABC):
    """A loss of α made of the task's loss and the expected cost; gradients flow through both."""

    @abstractmethod
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss of α.

        Args:
            loss: of the task, a scalar.
            cost: expected cost, a scalar in the unit of the reference.
        """


@final
class NoPenalty(Penalty):
    """The task's loss alone."""

    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss unchanged."""
        return loss


@final
@dataclass(frozen=True)
class RelativeLogPenalty(Penalty):
    """``mul#log``: CE · α (log E / log r)^β.

    Attributes:
        reference: r > 1.
        scale: α > 0.
        exponent: β >= 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    reference: float
    scale: float = 0.2
    exponent: float = 0.3

    def __post_init__(self) -> None:
        _check("reference", self.reference, above=1)
        _check("scale", self.scale, above=0)
        _check_weight("exponent", self.exponent)

    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the product."""
        relative = _log(cost) / math.log(self.reference)
        return loss * self.scale * relative**self.exponent


@final
@dataclass(frozen=True)
class LogPenalty(Penalty):
    """FBNet: CE · α (log E)^β.

    Attributes:
        scale: α > 0.
        exponent: β >= 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    scale: float = 0.2
    exponent: float = 0.6

    def __post_init__(self) -> None:
        _check("scale", self.scale, above=0)
        _check_weight("exponent", self.exponent)

    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the product."""
        return loss * self.scale * _log(cost) ** self.exponent


@final
@dataclass(frozen=True)
class LinearPenalty(Penalty):
    """``add#linear``: CE + λ (E - r) / r.

    Attributes:
        reference: r > 0.
        weight: λ >= 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    reference: float
    weight: float = 0.1

    def __post_init__(self) -> None:
        _check("reference", self.reference, above=0)
        _check_weight("weight", self.weight)

    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the sum."""
        return loss + self.weight * (cost - self.reference) / self.reference


@final
@dataclass(frozen=True)
class AbsolutePenalty(Penalty):
    """Adds β |cost / reference - 1| to the loss, as TuNAS does.

    Attributes:
        reference: r > 0, the cost to meet.
        weight: β >= 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    reference: float
    weight: float = 0.1

    def __post_init__(self) -> None:
        _check("reference", self.reference, above=0)
        _check_weight("weight", self.weight)

    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the sum."""
        return loss + self.weight * (cost / self.reference - 1).abs()


def _log(cost: Tensor) -> Tensor:
    if not cost > 1:
        raise ValueError(
            f"the logarithm of the cost needs an expected cost above 1, got {float(cost)}: give costs "
            "in a smaller unit, or take a linear or absolute penalty"
        )
    return cost.log()


def _check(name: str, value: float, *, above: float) -> None:
    if not above < value < math.inf:
        raise ConfigurationError(f"{name} of the penalty must be above {above}, got {value}")


def _check_weight(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} of the penalty must be at least 0, got {value}")
