"""Penalties on the expected cost of a network in the loss of α.

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
from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import check_range


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
