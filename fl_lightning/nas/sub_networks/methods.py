"""Training methods of a `OneShot`: the sub-networks that a step trains, and its loss.

    RandomPath   CE(s_i, y)                                          s_i drawn uniformly
    Shrinking    CE(largest, y), CE(s_i, y) + λ KD(s_i, largest)     s_i drawn from the options of a round
    Sandwich     CE(largest, y), KD(smallest, largest), KD(s_i, largest)
    Attentive    as Sandwich, s_i the best or worst of several of similar cost: in `attentive`

The loss of a step is the mean of these terms, so that a learning rate fits any number of sub-networks.

    KD(s, t) = -Σ_k p_k log q_k,   p: softmax of the logits of t, constant; q: softmax of those of s

For a client with a budget, the largest network is the largest that it can afford, and drawn networks are cut
to it. Draws are a function of (seed, round, client, step), so that a resumed run repeats them.
Progressive shrinking: first only the largest network trains, then smaller kernels, depths and widths join in
this order, one option per phase.
Sources: Cai et al. 2020, ICLR (Once-for-All), sections 3 and 3.2; Yu et al. 2020, ECCV (BigNAS), section 3.1.
Differs: the papers use the sum of the losses. In `Shrinking` the largest network keeps learning from labels,
and teaches; with ``largest: frozen`` a copy from the end of the first phase teaches, and the largest no longer
trains, as in the paper. The paper trains 1, 2 and 4 sub-networks per step for kernel, depth and width, and both
smaller kernels join at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, final

import torch
from torch import Generator, Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.sub_networks.capability import within


@dataclass(frozen=True, eq=False)
class Step:
    """Inputs for a training method in one local step: largest sub-network, logits, losses, random generator.

    Attributes:
        limit: largest sub-network that the client trains.
        round_: index of the round, or of the epoch without a federation.
        num_rounds: planned number of rounds; 0 if unknown.
        generator: generator of the step's draws.
        seed: seed of draws that are made once per run.
        networks: networks that share the weights.
        logits: returns the logits of a sub-network on the batch.
        labels_loss: returns the loss of logits against the labels of the batch.
        whole: returns the logits of the largest network, with its dropout and drop-connect.
        frozen: returns the logits of a sub-network in the weights of a frozen teacher, see `Shrinking`.
    """

    limit: Architecture
    round_: int
    num_rounds: int
    generator: torch.Generator
    seed: int
    networks: Networks
    logits: Callable[[Architecture], Tensor]
    labels_loss: Callable[[Tensor], Tensor]
    whole: Callable[[Architecture], Tensor]
    frozen: Callable[[Architecture], Tensor]

    @property
    def space(self) -> SizeSpace:
        """Search space of the sub-networks."""
        space = self.limit.space
        assert isinstance(space, SizeSpace)
        return space

    def drawn(self) -> Architecture:
        """Draw a random sub-network, and cut its sizes to the largest that the client trains."""
        return within(self.space.sample(self.generator), self.limit)


class Method(ABC):
    """Base of the methods by which a `OneShot` trains sub-networks; subclasses are frozen dataclasses."""

    @abstractmethod
    def loss(self, step: Step) -> Tensor:
        """Return a local step's loss, averaged over the sub-networks that the step trains."""

    def check(self, space: SizeSpace) -> None:  # noqa: B027 - most methods train any space
        """Raise ConfigurationError if the method cannot train this search space."""

    def factor(self, schedule: Schedule, space: SizeSpace, round_: int, num_rounds: int) -> float:
        """Return the factor on the learning rate in a round; by default that of the schedule."""
        return schedule.factor(round_, num_rounds)


@final
@dataclass(frozen=True)
class RandomPath(Method):
    """Single-path training: in each step uniformly drawn sub-networks learn from labels.

    Attributes:
        num_drawn: number of sub-networks per step, at least 1.
    """

    num_drawn: int = 1

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 1")

    @override
    def loss(self, step: Step) -> Tensor:
        drawn = [step.drawn() for _ in range(self.num_drawn)]
        return _mean(step.labels_loss(step.logits(network)) for network in drawn)


@final
@dataclass(frozen=True)
class Sandwich(Method):
    """Sandwich rule of BigNAS: the largest network learns from labels, and teaches the smallest and drawn ones.

    Attributes:
        num_drawn: number of drawn sub-networks per step, at least 0.
    """

    num_drawn: int = 2

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 0")

    @override
    def loss(self, step: Step) -> Tensor:
        return sandwich_loss(step, [step.drawn() for _ in range(self.num_drawn)])


def sandwich_loss(step: Step, drawn: Sequence[Architecture]) -> Tensor:
    """Return the mean loss of a sandwich step: the largest network's on labels, the others' by distillation.

    Drawn networks that equal the largest are left out: they would learn from themselves.

    Args:
        step: the local step.
        drawn: sub-networks that train beside the largest and the smallest.
    """
    teacher = step.whole(step.limit)
    students = [network for network in (step.space.smallest, *drawn) if network != step.limit]
    taught = (distillation_loss(step.logits(network), teacher) for network in students)
    return _mean([step.labels_loss(teacher), *taught])


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross entropy between teacher's and student's class probabilities, averaged over examples.

    Args:
        student: logits of the student, shape (batch, num_classes).
        teacher: logits of the teacher, same shape; no gradient flows into them.

    Example:
        >>> student, teacher = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, -1.0]])
        >>> round(distillation_loss(student, teacher).item(), 6)
        0.904005
    """
    return -(teacher.detach().softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


def _mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


@final
@dataclass(frozen=True)
class Shrinking(Method):
    """Progressive shrinking of Once-for-All: first the largest network trains, then smaller options join by phases.

    Attributes:
        rounds: number of rounds of each phase: the largest network alone, then one phase per option that
            joins; the last phase has no end. None for phases of equal length.
        order: kinds of size, such as ``kernel``, in the order in which they shrink; others stay largest.
            None for resolution, kernel, depth, then all others.
        num_drawn: number of drawn sub-networks per step, at least 1.
        distillation: weight λ of the distillation from the largest network, at least 0.
        sort: whether channels are sorted by importance before a narrower width joins.
        largest: role of the largest network after its phase. ``learns``: it trains on labels in every
            step and teaches the drawn networks. ``frozen``: a copy from the end of its phase teaches, as
            published; in a short run drawn networks then overwrite the largest. ``shared``: it teaches with
            the current weights and does not train.
        rates: factor of the learning rate in each phase; the schedule then restarts in every phase, as
            published. None for one schedule over the run.

    Raises:
        ConfigurationError: for values out of range, and in `check` for a space that they do not fit.

    Example:
        >>> from fl_lightning.nas.spaces.mobilenet import MobileNet
        >>> method = Shrinking((10, 5, 5, 4, 4, 4, 4), ("kernel", "depth", "expansion"))
        >>> [method.kept(MobileNet(), round_)[:3] for round_ in (0, 10, 20, 35)]  # depth, kernel, expansion
        [[1, 1, 1], [1, 2, 1], [2, 3, 1], [3, 3, 3]]
    """

    rounds: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None
    num_drawn: int = 1
    distillation: float = 1.0
    sort: bool = True
    largest: Literal["learns", "frozen", "shared"] = "learns"
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_range("num_drawn", self.num_drawn, "at least 1")
        check_range("distillation", self.distillation, "at least 0 and finite")
        for rate in self.rates or ():
            check_range("rates", rate, "above 0 and finite")

    @override
    def check(self, space: SizeSpace) -> None:
        known, order = space.most_options, self.order_in(space)
        if set(order) - set(known) or len(set(order)) < len(order):
            raise ConfigurationError(
                f"model.method.order must be some of {', '.join(known)} for {space.name}, each once; got "
                f"{', '.join(order)}"
            )
        phases = 1 + sum(known[name] - 1 for name in order)
        given = {"rounds": self.rounds, "rates": self.rates}
        for name, numbers in given.items():
            if numbers is not None and (len(numbers) != phases or min(numbers) < 0):
                raise ConfigurationError(
                    f"model.method.{name} must have {phases} numbers of at least 0, one for the largest network "
                    f"alone and one for each smaller option of {', '.join(order)}; got {list(numbers)}"
                )
        if self.largest == "frozen" and self.rounds is not None and not self.rounds[0]:
            raise ConfigurationError(
                "model.method.largest: frozen needs a largest network that has trained alone, and rounds begins "
                "with 0: set its first number to 1 or more"
            )

    def order_in(self, space: SizeSpace) -> tuple[str, ...]:
        """Return the kinds of size (kernel, depth, …) in the order in which smaller options join."""
        published = sorted(space.most_options, key=lambda kind: _FIRST.get(kind, len(_FIRST)))
        return tuple(published) if self.order is None else self.order

    def starts(self, space: SizeSpace, num_rounds: int = 0) -> list[int]:
        """Return the first round of each shrinking phase, for a run of `num_rounds` rounds."""
        most = space.most_options
        phases = 1 + sum(most[name] - 1 for name in self.order_in(space))
        if self.rounds is None:
            return [math.ceil(phase * num_rounds / phases) for phase in range(phases)]
        return [0, *accumulate(self.rounds[:-1])]

    def phase(self, space: SizeSpace, round_: int, num_rounds: int = 0) -> int:
        """Return the index of the shrinking phase that a round belongs to."""
        return sum(round_ >= start for start in self.starts(space, num_rounds)[1:])

    def kept(self, space: SizeSpace, round_: int, num_rounds: int = 0) -> list[int]:
        """Return, for each decision, how many of its options train in a round, counted from the largest option."""
        left, most = self.phase(space, round_, num_rounds), space.most_options
        joined = dict.fromkeys(most, 0)
        for name in self.order_in(space):
            joined[name] = min(left, most[name] - 1)
            left -= joined[name]
        pairs = zip(space.kinds, space.decisions, strict=True)
        return [min(1 + joined[kind], len(decision.options)) for kind, decision in pairs]

    def sample(self, space: SizeSpace, kept: Sequence[int], generator: Generator) -> Architecture:
        """Draw a sub-network uniformly from the options that train now: each decision's `kept` largest ones."""
        choices = []
        for decision, number in zip(space.decisions, kept, strict=True):
            drawn = int(torch.randint(number, (), generator=generator))
            choices.append(len(decision.options) - number + drawn)
        return space.architecture(choices)

    @override
    def factor(self, schedule: Schedule, space: SizeSpace, round_: int, num_rounds: int) -> float:
        if self.rates is None:
            return schedule.factor(round_, num_rounds)
        phase = self.phase(space, round_, num_rounds)
        start, end = [*self.starts(space, num_rounds), num_rounds][phase : phase + 2]
        length = max(1, end - start) if num_rounds > 0 else num_rounds  # a run without end
        return self.rates[phase] * schedule.factor(round_ - start, length)

    @override
    def loss(self, step: Step) -> Tensor:
        """Return the mean loss of the sub-networks that train; in the first phase the loss of the largest alone."""
        when = step.space, step.round_, step.num_rounds
        if self.phase(*when) == 0:
            return step.labels_loss(step.whole(step.limit))
        losses = []
        teacher = None
        if self.largest == "learns":
            teacher = step.whole(step.limit)
            losses.append(step.labels_loss(teacher))
        elif self.distillation:
            with torch.no_grad():
                run = step.frozen if self.largest == "frozen" else step.logits
                teacher = run(step.limit)
        kept = self.kept(*when)
        for _ in range(self.num_drawn):
            logits = step.logits(within(self.sample(step.space, kept, step.generator), step.limit))
            loss = step.labels_loss(logits)
            if self.distillation and teacher is not None:
                loss = loss + self.distillation * distillation_loss(logits, teacher)
            losses.append(loss)
        return _mean(losses)


_FIRST = {"resolution": 0, "kernel": 1, "depth": 2}
