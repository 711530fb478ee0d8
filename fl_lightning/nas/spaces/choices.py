"""Choices in a network: numbers that layers follow while it runs.

A layer whose size is a choice is built for the largest option and runs with the current one, see `elastic`.
So all networks of a space share the weights of one. In the network of one architecture sizes are numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.core.errors import ConfigurationError

Number = int | float


class OpenSize:
    """A size that follows choices: a function of chosen values and of other sizes.

    Example:
        >>> width = ValueChoice([16, 32], label="width")
        >>> hidden = width * 4
        >>> hidden.now, hidden.most
        (128, 128)
        >>> width.index = 0
        >>> hidden.now, hidden.most
        (64, 128)
    """

    def __init__(self, compute: Callable[..., Number], *inputs: Size) -> None:
        self._compute, self._inputs = compute, inputs

    @property
    def now(self) -> Any:
        """The value under the present choices."""
        return self._compute(*map(now, self._inputs))

    @property
    def most(self) -> Any:
        """The value if every choice is its last option."""
        return self._compute(*map(most, self._inputs))

    def __mul__(self, factor: Size) -> OpenSize:
        return OpenSize(operator.mul, self, factor)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Size) -> OpenSize:
        return OpenSize(operator.floordiv, self, divisor)


class ValueChoice(OpenSize):
    """A number to choose: a width, a kernel, a depth.

    Args:
        options: different numbers above 0, rising.
        label: name of the decision; choices of one name in a network are one decision.

    Attributes:
        index: number of the present option.

    Raises:
        ConfigurationError: if the options are not rising numbers above 0.
    """

    def __init__(self, options: Sequence[Number], label: str) -> None:
        self.options, self.label = tuple(options), label
        if not self.options or list(self.options) != sorted(set(self.options)):
            raise ConfigurationError(
                f"the options of {label} must be different numbers that rise, got {self.options}"
            )
        if self.options[0] <= 0:
            raise ConfigurationError(f"{label} must be above 0, got {self.options[0]:g}")
        self.index = len(self.options) - 1

    @property
    def now(self) -> Any:
        """The present option."""
        return self.options[self.index]

    @property
    def most(self) -> Any:
        """The last option."""
        return self.options[-1]


Size = Number | OpenSize


def is_open(*sizes: Any) -> bool:
    """True if one of the sizes follows choices."""
    return any(isinstance(size, OpenSize) for size in sizes)


def now(size: Size) -> Any:
    """Return the present value of a size."""
    return size.now if isinstance(size, OpenSize) else size


def most(size: Size) -> Any:
    """Return the largest value of a size."""
    return size.most if isinstance(size, OpenSize) else size


def size_of(compute: Callable[..., Number], *inputs: Size) -> Any:
    """Return a function of sizes: a number, or a size that follows choices if one of them does."""
    return OpenSize(compute, *inputs) if is_open(*inputs) else compute(*inputs)
