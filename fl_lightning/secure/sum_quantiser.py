"""Conversion of updates to integers whose sum cannot overflow, and of the sum to a mean.

    q_i = ξ((x_i + c) L / 2c)       ξ(y) = ⌊y⌋ + 1 with probability y - ⌊y⌋, else ⌊y⌋;  |x_i| ≤ c
    sent: (w q_1, …, w q_k, w)      w = min(num_examples, max_examples)
    Σ w x ≈ (2c / L) Σ w q - c Σ w  n L max_examples < R = 2^bits, checked

The number of examples of each client is one more coordinate, so the server learns only the total. The
rounding is unbiased, the error of the mean below one step 2c / L. Source: Bonawitz et al. 2019
(1912.00131), section 2; the form with bounds ±c and a count is that of Flower's secure aggregation,
which does not check for overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.secure.entropy import Draws
from fl_lightning.secure.ring import Ring, RingIntegers

ACCURACY = 1e-6  # of a mean, by default
MOST_LEVELS = 1 << 48
CHUNK = 1 << 14  # numbers at a time, whose intermediate results fit into the cache


@dataclass(frozen=True, kw_only=True)
class SumQuantiser:
    """Converts updates to integers modulo 2^bits whose sum cannot overflow, and this sum to a mean.

    Args:
        num_clients: largest number of vectors in a sum.
        clip: c > 0; numbers beyond ±c are moved there.
        levels: L ≥ 1, the number of steps from -c to c; with an even number, zero is a level.
        max_examples: largest weight of a client, ≥ 1; 1 weights all clients equally.
        bits: bits of the ring, from 1 to 64.

    Raises:
        ValueError: if an option is outside its range, or if a sum might not fit into the ring.

    Example:
        >>> quantiser = SumQuantiser(num_clients=2, clip=1.0, levels=2, max_examples=10)
        >>> draws = np.random.default_rng(0).random
        >>> one = quantiser.encode(torch.tensor([1.0, -1.0]), 3, draws)
        >>> two = quantiser.encode(torch.tensor([0.0, 9.0]), 1, draws)
        >>> one, two
        (array([6, 0, 3], dtype=uint32), array([1, 2, 1], dtype=uint32))
        >>> quantiser.mean(one + two)
        tensor([ 0.7500, -0.5000], dtype=torch.float64)
        >>> SumQuantiser(num_clients=100, max_examples=1000, bits=32)
        Traceback (most recent call last):
        ...
        ValueError: a sum may overflow: num_clients 100 * levels 65536 * max_examples 1000 = \
6553600000 must be below 2^32 = 4294967296; use bits of at least 33, or fewer levels
    """

    num_clients: int
    clip: float = 8.0
    levels: int = 1 << 16
    max_examples: int = 1
    bits: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be a positive number, got {self.clip}")
        if not 1 <= self.levels <= MOST_LEVELS:
            raise ValueError(f"levels must be from 1 to 2^48, got {self.levels}")
        for name in ("num_clients", "max_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        modulus = Ring(self.bits).modulus
        if self.largest_sum >= modulus:
            raise ValueError(
                f"a sum may overflow: num_clients {self.num_clients} * levels {self.levels} * "
                f"max_examples {self.max_examples} = {self.largest_sum} must be below 2^{self.bits}"
                f" = {modulus}; {self._remedy()}"
            )

    @classmethod
    def of(
        cls,
        *,
        num_clients: int,
        clip: float,
        levels: int | None,
        max_examples: int,
        bits: int | None,
        least: int,
    ) -> SumQuantiser:
        """Return a quantiser; where ``levels`` or ``bits`` are None, choose them so that they fit each other.

        Args:
            num_clients: largest number of vectors in a sum.
            clip: c.
            levels: L; None for the power of two with means within `ACCURACY`, or the most that the bits hold.
            max_examples: largest weight of a client.
            bits: bits of the ring; None for the fewest that hold a sum.
            least: smallest number of levels that is chosen.

        Raises:
            ValueError: if an option is outside its range, or the ring cannot hold a sum.

        Example:
            >>> options = {"num_clients": 5, "clip": 1.0, "max_examples": 1024, "least": 2**16}
            >>> [SumQuantiser.of(levels=None, bits=b, **options).levels for b in (None, 32)]
            [4194304, 524288]
        """

        def made(levels: int) -> SumQuantiser:
            fewest = max(1, min(64, (num_clients * levels * max_examples).bit_length()))
            return cls(
                num_clients=num_clients,
                clip=clip,
                levels=levels,
                max_examples=max_examples,
                bits=bits or fewest,
            )

        if levels is not None:
            return made(levels)
        made(least)  # raises if not even this many levels fit
        wanted = 1 << max(
            0, math.ceil(math.log2(4 * clip / ACCURACY))
        )  # float32 has the other half
        held = ((1 << (bits or 64)) - 1) // (num_clients * max_examples)
        fitting = 1 << max(0, held.bit_length() - 1)
        return made(max(least, min(wanted, fitting, MOST_LEVELS)))

    @property
    def largest_sum(self) -> int:
        """Largest possible sum of one coordinate over ``num_clients`` clients."""
        return self.num_clients * self.levels * self.max_examples

    @property
    def ring(self) -> Ring:
        """Ring of integers modulo 2^bits in which quantised updates are added."""
        return Ring(self.bits)

    @property
    def step(self) -> float:
        """Distance between two neighbouring levels of the quantiser, in the units of updates."""
        return 2 * self.clip / self.levels

    def levels_of(self, delta: Tensor, draw: Draws) -> RingIntegers:
        """Round each number of an update to a level, up or down at random; return levels, uint64 from 0 to ``levels``.

        Raises:
            ValueError: if a number is not finite.
        """
        if not torch.isfinite(delta).all():
            raise ValueError("an update with numbers that are not finite cannot be quantised")
        values = delta.detach().cpu()
        levels = np.empty(len(values), np.uint64)
        for start in range(0, len(values), CHUNK):
            part = slice(start, start + CHUNK)
            exact = values[part].double().numpy().clip(-self.clip, self.clip)
            exact += self.clip
            exact *= self.levels / (2 * self.clip)
            low = np.floor(exact)
            low += draw(len(low)) < exact - low
            levels[part] = low.clip(0, self.levels, out=low)
        return levels

    def encode(self, delta: Tensor, num_examples: int, draw: Draws) -> RingIntegers:
        """Quantise an update: return the integers that a client adds to the sum, of the ring's dtype, shape (k + 1,).

        Args:
            delta: update, shape (k,).
            num_examples: number of examples of the client, ≥ 1; at most ``max_examples`` count.
            draw: draws n numbers in [0, 1): the ``random`` of a seeded generator, or `uniform_draws`.

        Raises:
            ValueError: if a number is not finite, or there are no examples.
        """
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {num_examples}")
        counted = min(num_examples, self.max_examples)
        sent = np.append(self.levels_of(delta, draw), np.uint64(1))
        sent *= np.uint64(counted)
        return sent.astype(self.ring.dtype)

    def mean(self, total: RingIntegers) -> Tensor:
        """Return the mean Σ w x / Σ w of updates x with weights w, float64 of shape (k,), from their encoded sum.

        Args:
            total: sum of at most ``num_clients`` encoded vectors, shape (k + 1,).

        Raises:
            ValueError: if ``total`` cannot be such a sum.
        """
        counted = int(total[-1]) if len(total) else 0
        if not 1 <= counted <= self.num_clients * self.max_examples:
            raise ValueError(f"no sum of {self.num_clients} updates: it counts {counted} examples")
        if len(total) > 1 and int(total[:-1].max()) > counted * self.levels:
            raise ValueError(
                f"no sum of updates that count {counted} examples: a coordinate is "
                f"{total[:-1].max()}, above {counted * self.levels}"
            )
        values = total[:-1].astype(np.float64) * self.step - self.clip * counted
        return torch.from_numpy(values) / counted

    def _remedy(self) -> str:
        needed = self.largest_sum.bit_length()
        if needed <= 64:
            return f"use bits of at least {needed}, or fewer levels"
        return "use fewer levels or smaller max_examples: bits are at most 64"
