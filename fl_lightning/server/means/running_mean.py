"""Weighted means in one pass with constant memory, plain and exact.

The exact mean is bit-identical for any order and grouping of the vectors:

    v = w x,   h = round(2²⁰ v),   l = round(2⁶⁰ (v - h / 2²⁰)),   mean = (Σh / 2²⁰ + Σl / 2⁶⁰) / Σw

Sums of floating-point numbers depend on their order, sums of integers do not. Each product is
rounded, by itself, to a multiple of 2⁻⁶⁰ and split into two integers of 64 bits. The rounding error
of a mean over K vectors is at most K 2⁻⁶¹ / Σw ≤ 4.4e-19 before it is rounded once to the vectors'
dtype: less than the half unit in the last place which float32 sums lose per addition, wherever the
mean is above 1.5e-11. It takes four times the memory of `RunningMean` in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, RoundFailure


class RunningMean:
    """A weighted mean, updated vector by vector: m ← m + w / Σw (x - m).

    The mean of one vector, or of any number of equal ones, is that vector, bit for bit.

    Example:
        >>> mean = RunningMean(torch.empty(1))
        >>> mean.add(torch.tensor([1.0]), weight=1)
        >>> mean.add(torch.tensor([4.0]), weight=2)
        >>> mean.value()
        tensor([3.])
    """

    def __init__(self, like: Tensor) -> None:
        self._mean = torch.zeros_like(like)
        self._weight = 0.0

    def add(self, vector: Tensor, weight: float) -> None:
        """Add one vector of shape (k,); with weight 0 it has no effect, but must be finite."""
        self._weight += weight
        self._mean.lerp_(vector, weight / self._weight if weight else 0.0)

    def add_rows(self, vectors: Tensor, weights: Sequence[float]) -> None:
        """Add m vectors, shape (m, k); bit-identical to adding one after the other."""
        for vector, weight in zip(vectors, weights, strict=True):
            self.add(vector, weight)

    def value(self) -> Tensor:
        """Return the mean so far, which changes as vectors are added; zeros if none was."""
        return self._mean

    def sums(self) -> list[Tensor]:
        """Return this process's sums of vectors and weights, to be added up over all processes."""
        wide = torch.float32 if self._mean.device.type == "mps" else torch.float64
        weight = torch.tensor(self._weight, dtype=wide, device=self._mean.device)
        return [self._mean * weight, weight]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Replace the state by the `sums` added up over all processes."""
        total, weight = sums
        self._weight = float(weight)
        self._mean = (total / (self._weight or 1.0)).to(self._mean)


def new_mean(like: Tensor, *, exact: bool) -> RunningMean | ExactMean:
    """Return an empty mean for vectors with the shape, dtype and device of ``like``."""
    return ExactMean(like) if exact else RunningMean(like)


_HIGH, _LOW = 2.0**20, 2.0**60
# of Σ |w x|: the high parts then stay below 2⁶² in all, half of what an integer holds
LARGEST_SUM = 2.0**42


def check_summable(vector: Tensor, weight: float, num_vectors: int) -> None:
    """Raise RoundFailure if an exact mean of vectors as large as this one might overflow.

    Args:
        vector: one vector of the mean, shape (k,).
        weight: weight of the vector.
        num_vectors: number of vectors in the mean.

    Raises:
        RoundFailure: with the largest entry that is allowed.

    Example:
        >>> check_summable(torch.tensor([1e9]), weight=100, num_vectors=10)
        >>> check_summable(torch.tensor([1e9]), weight=100, num_vectors=100)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.RoundFailure: an entry of 1e+09 is too large for an exact mean: with weight \
100, one of 100 vectors has entries up to 4.4e+08
    """
    largest = float(vector.abs().max()) if vector.numel() else 0.0
    most = LARGEST_SUM / (num_vectors * max(weight, 1.0))
    if not largest <= most:
        raise RoundFailure(
            f"an entry of {largest:.2g} is too large for an exact mean: with weight {weight:g}, one of "
            f"{num_vectors} vectors has entries up to {most:.2g}"
        )


class ExactMean:
    """A weighted mean of vectors, bit-identical for any order and any number of processes.

    Weights are integers. The mean of one vector is that vector, bit for bit, if its entries are 0 or
    have a magnitude of at least 2⁻³⁷ ≈ 7e-12.

    Args:
        like: a vector with the shape (k,), dtype and device of the vectors.

    Raises:
        ConfigurationError: on devices without float64 (mps).

    Example:
        >>> def mean(*values):
        ...     mean = ExactMean(torch.empty(1))
        ...     for value in values:
        ...         mean.add(torch.tensor([value]), weight=1)
        ...     return mean.value()
        >>> mean(0.1, 1e6, -1e6), mean(1e6, -1e6, 0.1)
        (tensor([0.0333]), tensor([0.0333]))
        >>> torch.equal(mean(0.1, 1e6, -1e6), mean(1e6, -1e6, 0.1))
        True
    """

    def __init__(self, like: Tensor) -> None:
        if like.device.type == "mps":
            raise ConfigurationError("exact: true needs float64, which mps lacks: use exact: false")
        self._dtype = like.dtype
        self._high = torch.zeros_like(like, dtype=torch.int64)
        self._low = torch.zeros_like(like, dtype=torch.int64)
        self._weight = torch.zeros((), dtype=torch.int64, device=like.device)
        self._largest = torch.zeros((), dtype=torch.float64, device=like.device)

    def add(self, vector: Tensor, weight: float | Tensor) -> None:
        """Add one vector of shape (k,) to the mean."""
        product = vector.double() * weight
        if product.numel():
            self._largest += product.abs().max()
        high = (product * _HIGH).round_()
        self._high += high.long()
        self._low += product.sub_(high.div_(_HIGH)).mul_(_LOW).round_().long()
        self._weight += weight if isinstance(weight, int) else torch.as_tensor(weight).long()

    def add_rows(self, vectors: Tensor, weights: Sequence[float]) -> None:
        """Add m vectors, shape (m, k), to the mean."""
        for vector, weight in zip(vectors, weights, strict=True):
            self.add(vector, weight)

    def value(self) -> Tensor:
        """Return the mean so far; zeros if nothing was added.

        Raises:
            RoundFailure: if the integers may have overflowed.
        """
        if float(self._largest) > LARGEST_SUM:
            raise RoundFailure(
                f"with exact: true the sum of updates, each multiplied by its number of examples, must stay below "
                f"{LARGEST_SUM:.1e}, and this round reached {float(self._largest):.1e}: clip the clients' gradients, lower their "
                "learning rate, or set the aggregator's exact: false"
            )
        total = self._high.double() / _HIGH + self._low.double() / _LOW
        return (total / self._weight.clamp(min=1)).to(self._dtype)

    def sums(self) -> list[Tensor]:
        """Return this process's sums of vectors and weights, to be added up over all processes."""
        return [self._high, self._low, self._weight, self._largest]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Replace the state by the `sums` added up over all processes."""
        self._high, self._low, self._weight, self._largest = sums
