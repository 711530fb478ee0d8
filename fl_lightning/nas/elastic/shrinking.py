"""Progressive shrinking: smaller options join one after the other, as rounds go by.

    first only the largest; then kernels, depths and widths, in this order, each an option at a time

Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


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
        >>> [schedule.options(round_)["kernel"] for round_ in (0, 9, 10, 15)]
        [(7,), (7,), (5, 7), (3, 5, 7)]
        >>> schedule.options(20)["depth"], schedule.options(35)["expansion"]
        ((3, 4), (3, 4, 6))
    """

    space: SizeSpace
    order: tuple[str, ...]
    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        names = self._most()
        unknown = [name for name in self.order if name not in names]
        if unknown or len(set(self.order)) < len(self.order):
            raise ConfigurationError(
                f"order names each size of {self.space.name} at most once, of "
                f"{', '.join(names)}; got {', '.join(self.order)}"
            )
        phases = 1 + sum(names[name] - 1 for name in self.order)
        if len(self.rounds) != phases or min(self.rounds) < 0:
            raise ConfigurationError(
                f"rounds must have {phases} numbers from 0: of the largest alone and of each option "
                f"of {', '.join(self.order)} that joins; got {list(self.rounds)}"
            )

    def phase(self, round_: int) -> int:
        """Return the number of the phase that a round is in."""
        ends = list(accumulate(self.rounds))[:-1]
        return sum(round_ >= end for end in ends)

    def begins_phase(self, round_: int) -> bool:
        """Whether an option joins in this round: sort the channels before it."""
        return round_ > 0 and self.phase(round_) > self.phase(round_ - 1)

    def options(self, round_: int) -> dict[str, tuple[float, ...]]:
        """Return what may be chosen of each size in a round, where all parts have the same options.

        Of sizes whose options differ from part to part, those of the first part.
        """
        kept = self.kept(round_)
        options: dict[str, tuple[float, ...]] = {}
        for (_, size), number in zip(self.space.named_sizes, kept, strict=True):
            options.setdefault(size.name, size.options[-number:])
        return options

    def sample(self, round_: int, generator: torch.Generator) -> Architecture:
        """Return a sub-network of which every size is drawn uniformly from a round's options."""
        choices = []
        for (_, size), number in zip(self.space.named_sizes, self.kept(round_), strict=True):
            drawn = int(torch.randint(number, (), generator=generator))
            choices.append(len(size.options) - number + drawn)
        return self.space.architecture(choices)

    def kept(self, round_: int) -> list[int]:
        """Return how many of the largest options each decision has in a round."""
        left = self.phase(round_)
        joined = dict.fromkeys(self._most(), 0)
        for name in self.order:
            joined[name] = min(left, self._most()[name] - 1)
            left -= joined[name]
        sizes = [size for _, size in self.space.named_sizes]
        return [min(1 + joined[size.name], len(size.options)) for size in sizes]

    def _most(self) -> dict[str, int]:
        """The number of options of each size; the most, if parts differ."""
        most: dict[str, int] = {}
        for _, size in self.space.named_sizes:
            most[size.name] = max(len(size.options), most.get(size.name, 0))
        return most


def published_order(space: SizeSpace) -> tuple[str, ...]:
    """Return kernel, depth, then widths: the sizes of a space as Once-for-All shrinks them."""
    names = list(dict.fromkeys(size.name for _, size in space.named_sizes))
    first: Sequence[str] = [name for name in ("kernel", "depth") if name in names]
    return (*first, *(name for name in names if name not in first))
