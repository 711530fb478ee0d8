"""How a number in a training step depends on the examples of its batch.

    alike:   c · B^d                   what every batch of the size has, e.g. parameters
    rows:    f(example i) · B^d        along one axis, example after example
    total:   Σ_i f(example i) · B^d    over all examples; with d = -1 their mean
    mixed:   anything else

B is the number of examples. What does not depend on the batch is a mean over its examples as well, so
a mean may have it added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# (o, n), see `Kind.layout`
Layout = tuple[int, int]
ONE_EACH = (1, 1)


@dataclass(frozen=True)
class Kind:
    """How a tensor depends on the batch.

    Attributes:
        name: which of the four.
        degree: d, the power of the number of examples that it is proportional to; None for zeros,
            which are proportional to every one.
        axis: of ``rows``, where the examples are.
        layout: of ``rows``, (o, n) where the axis has o times all examples, each with n entries side by
            side: example i has the entries (p · B + i) · n + j.
        is_position: of ``rows``, whether they are the examples' numbers 0, 1, 2, …
        is_count: of ``alike``, whether it counts examples of which each should count, and is no
            number if one does not.
        why: of ``mixed``, in words.
    """

    name: Literal["alike", "rows", "total", "mixed"]
    degree: int | None = 0
    axis: int = 0
    layout: Layout = ONE_EACH
    is_position: bool = False
    is_count: bool = False
    why: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether its numbers do not grow or shrink with the batch, nor add its examples up."""
        return self.name in ("alike", "rows") and self.degree in (0, None) and not self.is_position

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over examples of what each comes to by itself."""
        if self.name == "total":
            return self.degree in (-1, None)
        return self.name == "alike" and self.degree in (0, None)

    def at(self, axis: int, layout: Layout | None = None) -> Kind:
        """Return rows along another axis."""
        return replace(self, axis=axis, layout=self.layout if layout is None else layout)

    def times(self, degree: int | None) -> Kind:
        """Return what it is multiplied by a number of a degree."""
        if self.degree is None or degree is None:
            return replace(self, degree=None, is_position=False)
        return replace(self, degree=self.degree + degree, is_position=False)


ALIKE = Kind("alike")
ZERO = Kind("alike", degree=None)


def rows(axis: int, layout: Layout = ONE_EACH, degree: int | None = 0) -> Kind:
    """Return the kind of a tensor with examples along an axis."""
    return Kind("rows", degree, axis, layout)


def total(degree: int | None) -> Kind:
    """Return the kind of a sum over examples."""
    return Kind("total", degree)


def mixed(why: str) -> Kind:
    """Return the kind of what nothing is known of."""
    return Kind("mixed", why=why)
