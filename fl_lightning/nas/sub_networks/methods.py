"""Methods that train a network of all sizes: the sub-networks and the loss of a step.

    RandomPath   CE(s_i, y)                                          s_i drawn uniformly
    Shrinking    CE(largest, y), CE(s_i, y) + λ KD(s_i, largest)     s_i drawn from what a round allows
    Sandwich     CE(largest, y), KD(smallest, largest), KD(s_i, largest)
    Attentive    the same, s_i the best or the worst of several of similar cost: in `attentive`

The loss of a step is the mean of these, so that the learning rate of a single network fits any number.

    KD(s, t) = -Σ_k p_k log q_k,   p: softmax of t's logits, fixed; q: of s's; its gradient is q - p

A client of limited capability has its largest for the largest, and its draws are cut to it. What is drawn is a
pure function of (seed, round, client, step): a run that goes on draws what it would have drawn.
Progressive shrinking lets smaller options join one after the other, as rounds go by: first only the largest;
then kernels, depths and widths, in this order, each an option at a time.
Sources: Cai et al. 2020, ICLR (Once-for-All), sections 3 and 3.2; Yu et al. 2020, ECCV (BigNAS), section 3.1.
Differs: losses are averaged, both papers add them up. Shrinking's teacher is the present largest network, which
goes on learning from labels; theirs is a copy from before it shrinks, and the largest is trained no more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.capability import CostOf, within

# accuracies of several architectures: higher is better
Predict = Callable[[Sequence[Architecture]], Sequence[float]]


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
        """Space to draw from."""
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
        """Return the loss of a step, the mean over the sub-networks that it trains."""

    def check(self, space: SizeSpace) -> None:  # noqa: B027 - most can train any
        """Raise ConfigurationError for a space that the method cannot train, saying why."""


@final
@dataclass(frozen=True)
class RandomPath(Method):
    """Trains sub-networks drawn uniformly, by labels.

    Attributes:
        num_drawn: how many in a step, at least 1.
    """

    num_drawn: int = 1

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 1")

    def loss(self, step: Step) -> Tensor:
        """Return the mean of the cross-entropies."""
        drawn = [step.drawn(step.generator) for _ in range(self.num_drawn)]
        return _mean(step.labels_loss(step.logits(network)) for network in drawn)


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
        keep_largest: whether the largest learns from labels in every step, beside the drawn ones. As
            published it does not; in a short run drawn networks then overwrite it.
    """

    rounds: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None
    num_drawn: int = 1
    distillation: float = 1.0
    sort: bool = True
    keep_largest: bool = True

    def __post_init__(self) -> None:
        for name in ("rounds", "order"):  # lists of a YAML file
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        check_range("num_drawn", self.num_drawn, "at least 1")
        check_range("distillation", self.distillation, "at least 0 and finite")

    def check(self, space: SizeSpace) -> None:
        """Raise ConfigurationError for phases that do not match the space."""
        self.schedule(space, num_rounds=1)

    def schedule(self, space: SizeSpace, num_rounds: int) -> ProgressiveShrinking:
        """Return the schedule of options over rounds."""
        order = self.order or published_order(space)
        rounds = self.rounds
        if rounds is None:
            rounds = _equal_phases(num_rounds, num_phases(most_options(space), order))
        return ProgressiveShrinking(space, order, rounds)

    def loss(self, step: Step) -> Tensor:
        """Return cross-entropies, plus λ times distillation once something smaller trains."""
        schedule = self.schedule(step.space, step.num_rounds)
        if schedule.phase(step.round_) == 0:
            return step.labels_loss(step.whole(step.limit))
        losses = []
        largest = None
        if self.keep_largest:
            largest = step.whole(step.limit)
            losses.append(step.labels_loss(largest))
        elif self.distillation:
            with torch.no_grad():
                largest = step.logits(step.limit)
        for _ in range(self.num_drawn):
            drawn = within(schedule.sample(step.round_, step.generator), step.limit)
            logits = step.logits(drawn)
            loss = step.labels_loss(logits)
            if self.distillation and largest is not None:
                loss = loss + self.distillation * distillation_loss(logits, largest)
            losses.append(loss)
        return _mean(losses)


@final
@dataclass(frozen=True)
class Sandwich(Method):
    """BigNAS: the largest learns from labels, the smallest and drawn ones from the largest.

    Attributes:
        num_drawn: how many are drawn in a step, at least 0.
    """

    num_drawn: int = 2

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 0")

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
    taught_losses = (distillation_loss(step.logits(network), teacher) for network in students)
    return _mean([step.labels_loss(teacher), *taught_losses])


def _mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def _equal_phases(num_rounds: int, num_phases: int) -> tuple[int, ...]:
    ends = [math.ceil(phase * num_rounds / num_phases) for phase in range(num_phases + 1)]
    return tuple(end - start for start, end in pairwise(ends))


# draws an architecture
Draw = Callable[[torch.Generator], Architecture]


def step_generator(seed: int, *, round_: int, client: int | None, step: int) -> torch.Generator:
    """Return the generator of a step's draws.

    Args:
        seed: of the run.
        round_: of the federation, or epoch without one.
        client: None: all clients draw the same in a step.
        step: of the client in this round.

    Example:
        >>> def draw(client, step):
        ...     generator = step_generator(0, round_=3, client=client, step=step)
        ...     return int(torch.randint(1000, (), generator=generator))
        >>> draw(5, 1) == draw(5, 1), draw(5, 1) == draw(6, 1), draw(None, 1) == draw(None, 2)
        (True, False, False)
    """
    return torch_generator(seed, "sub-networks", round_, 0 if client is None else client + 1, step)


def sandwich(
    space: SizeSpace,
    generator: torch.Generator,
    *,
    num_drawn: int = 2,
    draw: Draw | None = None,
    largest: Architecture | None = None,
) -> list[Architecture]:
    """Return the sub-networks of a step: the largest first, then the smallest, then drawn ones.

    Args:
        space: of sizes.
        generator: of the step.
        num_drawn: how many are drawn.
        draw: draws one; None: every size uniformly.
        largest: what a client can afford; None: the space's.
    """
    drawn = [(draw or space.sample)(generator) for _ in range(num_drawn)]
    return [largest or space.largest, space.smallest, *drawn]


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of a sub-network to the largest's probabilities, mean over examples.

    Args:
        student: its logits, (batch, num_classes).
        teacher: the largest's logits; no gradient flows into them.

    Example:
        >>> student, teacher = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, -1.0]])
        >>> round(distillation_loss(student, teacher).item(), 6)
        0.904005
    """
    return -(teacher.detach().softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


@dataclass(frozen=True)
class ProgressiveShrinking:
    """A schedule over rounds.

    Attributes:
        space: of sizes.
        order: names of sizes, in the order in which they shrink; those left out never do.
        rounds: of the phases: of the largest alone, then of each option that joins. The last phase
            lasts.

    Raises:
        ConfigurationError: if a name is no size of the space, or there is not a number for each phase.

    Example:
        >>> from fl_lightning.nas.spaces.mobilenet import MobileNet
        >>> schedule = ProgressiveShrinking(
        ...     MobileNet(), ("kernel", "depth", "expansion"), rounds=(10, 5, 5, 4, 4, 4, 4)
        ... )
        >>> [schedule.kept(round_)[:3] for round_ in (0, 10, 15, 20, 35)]  # depth, kernel, expansion
        [[1, 1, 1], [1, 2, 1], [1, 3, 1], [2, 3, 1], [3, 3, 3]]
    """

    space: SizeSpace
    order: tuple[str, ...]
    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        names = most_options(self.space)
        unknown = [name for name in self.order if name not in names]
        if unknown or len(set(self.order)) < len(self.order):
            raise ConfigurationError(
                f"order names each size of {self.space.name} at most once, of "
                f"{', '.join(names)}; got {', '.join(self.order)}"
            )
        phases = num_phases(names, self.order)
        if len(self.rounds) != phases or min(self.rounds) < 0:
            raise ConfigurationError(
                f"rounds must have {phases} numbers from 0: of the largest alone and of each option "
                f"of {', '.join(self.order)} that joins; got {list(self.rounds)}"
            )

    def phase(self, round_: int) -> int:
        """Return the number of the phase that a round is in."""
        ends = list(accumulate(self.rounds))[:-1]
        return sum(round_ >= end for end in ends)

    def sample(self, round_: int, generator: torch.Generator) -> Architecture:
        """Return a sub-network of which every size is drawn uniformly from a round's options."""
        choices = []
        for (_, size), number in zip(self.space.named_sizes, self.kept(round_), strict=True):
            drawn = int(torch.randint(number, (), generator=generator))
            choices.append(len(size.options) - number + drawn)
        return self.space.architecture(choices)

    def kept(self, round_: int) -> list[int]:
        """Number of the largest options that each decision has in a round."""
        left = self.phase(round_)
        most = most_options(self.space)
        joined = dict.fromkeys(most, 0)
        for name in self.order:
            joined[name] = min(left, most[name] - 1)
            left -= joined[name]
        sizes = [size for _, size in self.space.named_sizes]
        return [min(1 + joined[size.name], len(size.options)) for size in sizes]


def most_options(space: SizeSpace) -> dict[str, int]:
    """Return the number of options of each size; the most, if parts differ."""
    most: dict[str, int] = {}
    for _, size in space.named_sizes:
        most[size.name] = max(len(size.options), most.get(size.name, 0))
    return most


def num_phases(most: Mapping[str, int], order: Sequence[str]) -> int:
    """Return the number of phases: of the largest alone, and of each option that joins."""
    return 1 + sum(most.get(name, 1) - 1 for name in order)


def published_order(space: SizeSpace) -> tuple[str, ...]:
    """Return kernel, depth, then widths: the sizes of a space as Once-for-All shrinks them."""
    names = list(dict.fromkeys(size.name for _, size in space.named_sizes))
    first: Sequence[str] = [name for name in ("kernel", "depth") if name in names]
    return (*first, *(name for name in names if name not in first))
