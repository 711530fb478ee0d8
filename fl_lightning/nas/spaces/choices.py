"""Choices of layer sizes, each with several options; a network runs with one option of every choice.

A layer whose size is a choice is built for the largest option and runs with the current one, see `elastic`.
So all networks of a space share one set of weights. In the network of one architecture sizes are numbers.

Choices in a module of yours register with the `Building`, the context in which its constructor runs. In the
`Building` of one architecture a choice has a single option, so that nothing else is built.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from torch import nn

from fl_lightning.core.errors import ConfigurationError

Number = int | float


class OpenSize:
    """Layer size computed from choices of a search space, e.g. ``width * 4``.

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
        """Current size, under the options now set."""
        return self._compute(*map(now, self._inputs))

    @property
    def most(self) -> Any:
        """Largest size: every choice at its last option."""
        return self._compute(*map(most, self._inputs))

    def __mul__(self, factor: Size) -> OpenSize:
        return OpenSize(operator.mul, self, factor)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Size) -> OpenSize:
        return OpenSize(operator.floordiv, self, divisor)


class ValueChoice(OpenSize):
    """Choice of a layer size in a search space, such as a width, a kernel size or a depth.

    Args:
        options: numbers above 0, in rising order.
        label: name of the decision; choices with the same label are one decision.
        names: names of the options; the numbers if None.

    Attributes:
        index: index of the current option.

    Raises:
        ConfigurationError: if the options are not rising numbers above 0, or an earlier choice of this
            label has others.
    """

    def __init__(
        self, options: Sequence[Number], label: str, names: Sequence[str] | None = None
    ) -> None:
        self.options, self.label = tuple(options), label
        if not self.options or list(self.options) != sorted(set(self.options)):
            raise ConfigurationError(
                f"the options of {label} must be different numbers in rising order, got {self.options}"
            )
        if self.options[0] <= 0:
            raise ConfigurationError(
                f"the options of {label} must be above 0, got {self.options[0]:g}"
            )
        self.names = tuple(names or (f"{option:g}" for option in self.options))
        self._index = [len(self.options) - 1]  # shared by the choices of a label
        if (building := _BUILDING.get()) is not None:
            building.join(self)

    @property
    def index(self) -> int:
        """Index of the option now set."""
        return self._index[0]

    @index.setter
    def index(self, number: int) -> None:
        self._index[0] = number

    @property
    def now(self) -> Any:
        """Value of the option now set."""
        return self.options[self.index]

    @property
    def most(self) -> Any:
        """Value of the last (largest) option."""
        return self.options[-1]

    def follow(self, first: ValueChoice) -> None:
        """Share the option now set with an earlier choice that has the same label."""
        self._index = first._index


class Building:
    """Context for a module's constructor that collects the choices of sizes and layers it makes.

    Args:
        chosen: index of the chosen option by label, for the network of one architecture; None if all
            options are built.
        make_edge: makes the layer of a `LayerChoice`, from its label and candidates, for a search by a rule
            of relaxation; None if one candidate runs at a time.

    Attributes:
        choices: first choice of every label, in the order of construction.
        needs: repeated blocks that contain a choice, by its label: (label of the depth, index of the block).
    """

    def __init__(
        self, chosen: Mapping[str, int] | None = None, make_edge: MakeLayer | None = None
    ) -> None:
        self.make_edge, self.chosen = make_edge, chosen
        self.choices: dict[str, ValueChoice] = {}
        self.needs: dict[str, tuple[tuple[str, int], ...]] = {}
        self.inside: list[tuple[str, int]] = []
        self._all: dict[str, tuple[Number, ...]] = {}

    def join(self, choice: ValueChoice) -> None:
        """Register a choice that a constructor makes: choices with the same label are one decision.

        Raises:
            ConfigurationError: if sizes cannot be chosen here, or an earlier choice has other options.
        """
        label = choice.label
        if self.make_edge is not None:
            raise ConfigurationError(
                f"{label}: a Supernet chooses among layers and inputs, and this is a choice of a size: train a OneShot "
                "over a ModuleSpace of this module"
            )
        if self._all.setdefault(label, choice.options) != choice.options:
            raise ConfigurationError(
                f"choices with the same label must have the same options, and {label} has {choice.options} and "
                f"{self._all[label]}: give one of the choices another label"
            )
        if self.chosen is not None:
            number = self.chosen[label]
            choice.options, choice.index = (choice.options[number],), 0
        self.needs.setdefault(label, tuple(self.inside))
        choice.follow(self.choices.setdefault(label, choice))

    def __enter__(self) -> Self:
        self._token = _BUILDING.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _BUILDING.reset(self._token)
        del self._token  # it cannot be copied, and copies of modules hold their choices


# label, constructors of the candidates by name -> layer
MakeLayer = Callable[[str, Mapping[str, Callable[[], nn.Module]]], nn.Module]
_BUILDING: ContextVar[Building | None] = ContextVar("building", default=None)


def building() -> Building | None:
    """Return the `Building` whose context is active; None outside of one."""
    return _BUILDING.get()


@contextmanager
def inside(depth: Size, number: int) -> Iterator[None]:
    """Return a context to construct a repeated block, whose choices have no effect if the depth leaves it out."""
    current = _BUILDING.get()
    if current is None or not isinstance(depth, ValueChoice):
        yield
        return
    current.inside.append((depth.label, number))
    yield
    current.inside.pop()


Size = Number | OpenSize


def pick(options: Sequence[Number], label: str) -> Any:
    """Return a new choice of a size; while a single architecture is built, return its chosen number instead."""
    current, choice = _BUILDING.get(), ValueChoice(options, label)
    return choice if current is None or current.chosen is None else choice.now


def is_open(*sizes: Any) -> bool:
    """True if any of the sizes depends on a choice of the search space."""
    return any(isinstance(size, OpenSize) for size in sizes)


def now(size: Size) -> Any:
    """Return a size as a number, under the options now set."""
    return size.now if isinstance(size, OpenSize) else size


def most(size: Size) -> Any:
    """Return a size's largest value: every choice at its last option."""
    return size.most if isinstance(size, OpenSize) else size


def size_of(compute: Callable[..., Number], *inputs: Size) -> Any:
    """Compute a size from other sizes: a number, or an `OpenSize` if any of them depends on a choice."""
    return OpenSize(compute, *inputs) if is_open(*inputs) else compute(*inputs)
