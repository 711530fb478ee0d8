"""How a step trains a network of all sizes: a family, one class a method.

    RandomPath   L = Σ_i CE(s_i, y)                        s_i drawn uniformly
    Shrinking    L = Σ_i CE(s_i, y) + λ KD(s_i, largest)   s_i drawn from what a round allows
    Sandwich     L = CE(largest, y) + KD(smallest, largest) + Σ_i KD(s_i, largest)
    Attentive    the same, s_i the best or the worst of several of similar cost: in `attentive`

KD(s, t) is the cross-entropy of s to the probabilities of t, which are constants. A client of limited
capability has its largest for the largest, and its draws are cut to it. What is drawn is a function of
the step's generator alone. Sources: Cai et al. 2020 (Once-for-All), section 3; Yu et al. 2020 (BigNAS),
section 3.1.
Differs: Shrinking's teacher is the present largest network; theirs is a copy from before it shrinks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.elastic.attentive import Predict
from fl_lightning.nas.elastic.sandwich import distillation_loss, sandwich
from fl_lightning.nas.elastic.shrinking import ProgressiveShrinking, published_order
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.capability import CostOf, within


@dataclass(frozen=True, eq=False)
class Step:
    """A local step on a batch.

    Attributes:
        limit: the largest sub-network that may train.
        round_: of the federation, or epoch without one.
        num_rounds: planned; 0 if nobody knows.
        generator: of the step's draws.
        seed: of what is drawn once in a run.
        cost: of an architecture, in multiply-adds.
        logits: of a sub-network on the batch.
        labels_loss: of logits.
        whole: what makes the logits of the largest, with all that regularises it.
        predict: accuracies of architectures; None before a run has learnt to.
    """

    limit: Architecture
    round_: int
    num_rounds: int
    generator: torch.Generator
    seed: int
    cost: CostOf
    logits: Callable[[Architecture], Tensor]
    labels_loss: Callable[[Tensor], Tensor]
    whole: Callable[[Architecture], Tensor]
    predict: Predict | None = None

    @property
    def space(self) -> SizeSpace:
        """What to draw from."""
        space = self.limit.space
        assert isinstance(space, SizeSpace)
        return space

    def drawn(self, generator: torch.Generator) -> Architecture:
        """Return a sub-network, drawn uniformly, then cut to the limit."""
        return within(self.space.sample(generator), self.limit)


class Method(ABC):
    """A way to train sub-networks; a frozen dataclass without state."""

    @abstractmethod
    def loss(self, step: Step) -> Tensor:
        """Return the loss of a step, the sum over the sub-networks that it trains."""

    def check(self, space: SizeSpace) -> None:  # noqa: B027 - most can train any
        """Refuse a space that it cannot train.

        Raises:
            ConfigurationError: saying why.
        """


def check_drawn(num_drawn: int, least: int) -> None:
    """Refuse fewer draws in a step than make sense.

    Raises:
        ConfigurationError: with both numbers.
    """
    if num_drawn < least:
        raise ConfigurationError(f"num_drawn must be at least {least}, got {num_drawn}")


@final
@dataclass(frozen=True)
class RandomPath(Method):
    """Trains sub-networks drawn uniformly, by labels.

    Attributes:
        num_drawn: how many in a step, at least 1.
    """

    num_drawn: int = 1

    def __post_init__(self) -> None:
        check_drawn(self.num_drawn, 1)

    def loss(self, step: Step) -> Tensor:
        """Return the sum of the cross-entropies."""
        drawn = [step.drawn(step.generator) for _ in range(self.num_drawn)]
        return _sum(step.labels_loss(step.logits(network)) for network in drawn)


@final
@dataclass(frozen=True)
class Shrinking(Method):
    """Once-for-All's progressive shrinking.

    Attributes:
        rounds: of the phases: of the largest network alone, then of each option that joins; the last
            phase lasts. None: phases of equal length, over the rounds of the run.
        order: names of sizes, in the order in which they shrink; None: kernel, depth, widths.
        num_drawn: sub-networks in a step, at least 1.
        distillation: λ, how much the largest teaches them, at least 0.
        sort: whether channels are sorted by importance before a narrower width joins, see
            `sort_before_round`.
    """

    rounds: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None
    num_drawn: int = 1
    distillation: float = 1.0
    sort: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "order"):  # lists of a YAML file
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        check_drawn(self.num_drawn, 1)
        if not 0 <= self.distillation < math.inf:
            raise ConfigurationError(f"distillation must be at least 0, got {self.distillation}")

    def check(self, space: SizeSpace) -> None:
        """Refuse phases that are none of the space."""
        self.schedule(space, num_rounds=1)

    def schedule(self, space: SizeSpace, num_rounds: int) -> ProgressiveShrinking:
        """Return which options there are in which round."""
        order = self.order or published_order(space)
        rounds = self.rounds
        if rounds is None:
            rounds = _equal_phases(num_rounds, _num_phases(space, order))
        return ProgressiveShrinking(space, order, rounds)

    def loss(self, step: Step) -> Tensor:
        """Return cross-entropies, plus λ times distillation once something smaller trains."""
        schedule = self.schedule(step.space, step.num_rounds)
        if schedule.phase(step.round_) == 0:
            return step.labels_loss(step.whole(step.limit))
        teacher = None
        if self.distillation:
            with torch.no_grad():
                teacher = step.logits(step.limit)
        losses = []
        for _ in range(self.num_drawn):
            drawn = within(schedule.sample(step.round_, step.generator), step.limit)
            logits = step.logits(drawn)
            loss = step.labels_loss(logits)
            if teacher is not None:
                loss = loss + self.distillation * distillation_loss(logits, teacher)
            losses.append(loss)
        return _sum(iter(losses))


@final
@dataclass(frozen=True)
class Sandwich(Method):
    """BigNAS: the largest learns from labels, the smallest and drawn ones from the largest.

    Attributes:
        num_drawn: how many are drawn in a step, at least 0.
    """

    num_drawn: int = 2

    def __post_init__(self) -> None:
        check_drawn(self.num_drawn, 0)

    def loss(self, step: Step) -> Tensor:
        """Return the loss of the largest and of those that it teaches."""
        networks = sandwich(
            step.space,
            step.generator,
            num_drawn=self.num_drawn,
            draw=step.drawn,
            largest=step.limit,
        )
        return taught(step, networks)


def taught(step: Step, networks: Sequence[Architecture]) -> Tensor:
    """Return the loss of the first network by labels, and of the others by the first.

    A network that is the first once more is left out: it would learn from itself.
    """
    largest, *others = networks
    teacher = step.whole(largest)
    students = [network for network in others if network != largest]
    losses = (distillation_loss(step.logits(network), teacher) for network in students)
    return _sum(losses, step.labels_loss(teacher))


def _sum(losses: Iterator[Tensor], first: Tensor | None = None) -> Tensor:
    total = first
    for loss in losses:
        total = loss if total is None else total + loss
    assert total is not None
    return total


def _num_phases(space: SizeSpace, order: Sequence[str]) -> int:
    most: dict[str, int] = {}
    for _, size in space.named_sizes:
        most[size.name] = max(len(size.options), most.get(size.name, 0))
    return 1 + sum(most.get(name, 1) - 1 for name in order)


def _equal_phases(num_rounds: int, num_phases: int) -> tuple[int, ...]:
    ends = [math.ceil(phase * num_rounds / num_phases) for phase in range(num_phases + 1)]
    return tuple(end - start for start, end in pairwise(ends))
