"""An operator's call as the rules see it: its arguments, their kinds, and the same call at another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.client.state import same_value
from fl_lightning.engines.by_example.kinds import ALIKE, Kind, mixed, rows
from fl_lightning.engines.by_example.record import Call, Source


@dataclass(frozen=True)
class Seen:
    """A call in two runs of a step, on batches of two sizes.

    Attributes:
        call: in the run that is looked at.
        other: in the other one.
        size: examples in the run that is looked at, B ≥ 2.
        other_size: in the other one.
        kinds: of all tensors so far, by source number.
    """

    call: Call
    other: Call
    size: int
    other_size: int
    kinds: dict[int, Kind]

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments.get(name)

    def kind(self, name: str) -> Kind:
        """Return the kind of a tensor, or of a number, which are alike but for their degree."""
        value = self.call.arguments.get(name)
        if isinstance(value, Source):
            return self.kinds[value.number]
        return ALIKE.times(self.degree(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; that of a number is ()."""
        value = self.call.arguments.get(name)
        return value.shape if isinstance(value, Source) else ()

    def tensors(self, *without: str) -> list[str]:
        """Return the names of the arguments that are tensors."""
        given = self.call.arguments.items()
        return [n for n, value in given if isinstance(value, Source) and n not in without]

    def degree(self, name: str) -> int:
        """Return the power of the size that a number is proportional to.

        Raises:
            Differs: if it is none.
        """
        return degree_of(
            self.call.arguments.get(name),
            self.other.arguments.get(name),
            self.size,
            self.other_size,
        )

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.out_of(0)

    def out_of(self, place: int) -> tuple[int, ...]:
        """Return the shape of a result."""
        source = self.call.results[place]
        assert source is not None
        return source.shape

    def dims(self, name: str = "dim") -> list[int]:
        """Return axes counted from the front; all if none is given."""
        ndim, given = len(self.shape("self")), self.call.arguments.get(name)
        if given is None or given == []:
            return list(range(ndim))
        given = given if isinstance(given, list) else [given]
        return [dim % ndim if ndim else 0 for dim in given]

    def created(self, degree: int | None = 0) -> Kind:
        """Return the kind of a tensor that holds the same, or draws, wherever it is."""
        source, other = self.call.results[0], self.other.results[0]
        assert source is not None
        assert other is not None
        pairs = enumerate(zip(source.shape, other.shape, strict=True))
        grown = [axis for axis, (one, two) in pairs if one != two]
        if not grown:
            return Kind("alike", degree)
        if len(grown) > 1 or source.shape[grown[0]] % self.size:
            return mixed("a tensor's shape depends on the batch in more than one way")
        return rows(grown[0], (1, source.shape[grown[0]] // self.size), degree)

    def broadcast(self, names: Sequence[str]) -> Kind:
        """Return where examples are when tensors are taken entry by entry; its degree means nothing.

        Totals are taken for what all examples have.
        """
        ndim, found = len(self.out), None
        for name in names:
            kind = self.kind(name)
            if kind.name == "mixed":
                return kind
            if kind.name == "rows":
                moved = kind.at(kind.axis + ndim - len(self.shape(name)))
                if found is not None and (moved.axis, moved.layout) != (found.axis, found.layout):
                    return mixed("examples of a batch meet")
                found = moved
        if found is None:
            return ALIKE
        for name in names:
            kind, shape = self.kind(name), self.shape(name)
            axis = found.axis - ndim + len(shape)
            if kind.name != "rows" and axis >= 0 and shape[axis] != 1:
                return mixed("a fixed tensor has a row for each example")
        return rows(found.axis, found.layout)


class Differs(Exception):  # noqa: N818 - a finding
    """Two runs of a step on batches of two sizes are not one program."""


def degree_of(value: Any, other: Any, size: int, other_size: int) -> int:
    """Return d where a number is c · B^d for both sizes B, d being -1, 0 or 1.

    Raises:
        Differs: if there is none.

    Example:
        >>> degree_of(0.25, 0.5, 4, 2), degree_of(12, 6, 4, 2), degree_of("mean", "mean", 4, 2)
        (-1, 1, 0)
    """
    if same_value(value, other):
        return 0
    if isinstance(value, (int, float)) and isinstance(other, (int, float)):
        if _is_close(value * other_size, other * size):
            return 1
        if _is_close(value * size, other * other_size):
            return -1
    raise Differs(
        f"training_step computes with {other} for {other_size} examples, {value} for {size}"
    )


def _is_close(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-12 * max(abs(one), abs(two))
