"""Exact samples of Gaussian noise rounded to integers.

    round(N(0, σ²))        σ in steps of a grid

For an integer v, v + round(Z) = round(v + Z). The noisy value is thus a function of the Gaussian
mechanism's output, and every ε of that mechanism holds. Floating-point noise has no such guarantee: its
lowest bits reveal the value it was added to (Mironov 2012, "On significance of the least significant
bits").

The sampler uses rejection from strips of equal width w σ, a power of two of steps:

    strip b with probability ∝ exp(-(b w)²/2),  place u in [0, 1),
    accept with probability exp(-w² u (2b + u)/2)

The bits of u are the lower bits of the result. A uniform number is compared with a probability bit by
bit, with as many bits as the decision needs, so that all probabilities are exact.
Differs from the discrete Gaussian of Canonne, Kamath and Steinke 2020 (2004.00010), which has the same
lazy comparisons: in many dimensions only its Rényi divergence is bounded, not the privacy loss.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fl_lightning.core.seeds import Draw, Integers, Words
from fl_lightning.kernels.c_library import c_function, c_library

# A strip has between a 64th and a 128th of a standard deviation.
_STRIPS_PER_STDDEV = 64
LEAST_STDDEV, LARGEST_STDDEV = 2.0**8, 2.0**52
# Beyond this many standard deviations is less than 2⁻⁶³ of the distribution.
_TABLE_END = 9.3
# Bits of a word for the place; the other bits are a coin.
_PLACE_BITS, _COIN_BITS = 48, 16
# A generous bound on the error of a probability in double precision.
_DOUBT = 2.0**-36
# Numbers drawn at a time: their words take 1 MB, which fits into a processor's cache.
_CHUNK = 1 << 16
_SOURCE = Path(__file__).parent / "c" / "rounded_gaussian.c"


def rounded_gaussian(stddev: float, size: int, draw: Draw) -> Integers:
    """Draw normal numbers with standard deviation σ, exactly rounded to integers: int64, shape (size,).

    Args:
        stddev: σ of the normal numbers, in [2⁸, 2⁵²].
        size: number of draws.
        draw: source of random words; the numbers are a pure function of them.

    Raises:
        ValueError: if the standard deviation is out of range.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> draw = lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)
        >>> noise = rounded_gaussian(1e6, 100_000, draw)
        >>> noise.dtype, round(float(noise.std()) / 1e6, 2)
        (dtype('int64'), 1.0)
    """
    if not LEAST_STDDEV <= stddev <= LARGEST_STDDEV:
        raise ValueError(f"the standard deviation must be in [2^8, 2^52] steps, got {stddev}")
    strips = _strips(float(stddev))
    numbers = np.empty(size, np.int64)
    for start in range(0, size, _CHUNK):
        _fill(numbers[start : start + _CHUNK], strips, draw)
    return numbers


def _fill(numbers: Integers, strips: _Strips, draw: Draw) -> None:
    rejected = _try(numbers, strips, draw)
    while len(rejected):
        again = np.empty(len(rejected), np.int64)
        still = _try(again, strips, draw)
        numbers[rejected] = again
        rejected = rejected[still]


def _try(numbers: Integers, strips: _Strips, draw: Draw) -> Integers:
    """Draw candidate samples into ``numbers``, and return the indices of those rejected."""
    count = len(numbers)
    words = draw(2 * count)
    choices, places = words[:count], words[count:]
    which, has_open_strip = _first_pass(numbers, strips, choices, places)
    return which[~_accepted(strips, numbers, choices, places, which, has_open_strip, draw)]


def _first_pass(
    numbers: Integers, strips: _Strips, choices: Words, places: Words
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Draw samples; return the indices still to be decided, and a mask of those whose strip is undecided too."""
    if c_library(_SOURCE) is None:
        return first_pass(numbers, strips, choices, places)
    count = len(choices)
    which, is_open = np.empty(count, np.int64), np.empty(count, np.uint8)
    num, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [num, *[pointer] * 3, num, pointer, num, ctypes.c_double, *[pointer] * 3]
    function = c_function(_SOURCE, (), "first_pass", *types)
    function.restype = num
    arrays = [np.ascontiguousarray(words) for words in (choices, places)]
    num_open = function(
        count,
        *(array.ctypes.data for array in arrays),
        strips.ends.ctypes.data,
        len(strips.ends),
        strips.guide.ctypes.data,
        strips.shift,
        strips.curve,
        *(array.ctypes.data for array in (numbers, which, is_open)),
    )
    return which[:num_open].copy(), is_open[:num_open].astype(bool)


def first_pass(
    numbers: Integers, strips: _Strips, choices: Words, places: Words
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """NumPy version of the C function `first_pass`, bit-identical, for systems without a C compiler."""
    choice, ends = choices >> np.uint64(1), strips.ends
    strip = np.searchsorted(ends, choice, side="right")
    open_strip = strip == len(ends)
    open_strip |= (strip > 0) & (ends[np.maximum(strip, 1) - 1] == choice)
    place, coin = _place(places), places & np.uint64(2**_COIN_BITS - 1)
    numbers[:] = _numbers(strips, strip, place, choices)
    share = (place.astype(np.float64) + 1.0) * 2.0**-_PLACE_BITS
    fall = strips.curve * share * (2.0 * strip + share)
    accepted = (coin.astype(np.float64) + 1.0) * 2.0**-_COIN_BITS < 1.0 - fall
    which = np.flatnonzero(open_strip | ~accepted)
    return which, open_strip[which]


def _place(places: Words) -> Words:
    return places >> np.uint64(_COIN_BITS)


def _numbers(strips: _Strips, strip: Integers, place: Words, choices: Words) -> Integers:
    """Compute samples from their strip, position in the strip and sign, rounded to integers."""
    inside = (place >> np.uint64(_PLACE_BITS - 1 - strips.shift)) + np.uint64(1) >> np.uint64(1)
    magnitude = (strip.astype(np.int64) << strips.shift) + inside.astype(np.int64)
    sign = 1 - 2 * (choices & np.uint64(1)).astype(np.int64)
    numbers: Integers = magnitude * sign
    return numbers


def _accepted(
    strips: _Strips,
    numbers: Integers,
    choices: Words,
    places: Words,
    which: Integers,
    has_open_strip: npt.NDArray[np.bool_],
    draw: Draw,
) -> npt.NDArray[np.bool_]:
    """Return a mask of accepted samples, among those that the first pass left undecided."""
    strip = np.searchsorted(strips.ends, choices[which] >> np.uint64(1), side="right")
    for at in np.flatnonzero(has_open_strip):
        strip[at] = strips.strip_of(int(choices[which[at]] >> np.uint64(1)), draw)
    place, coin = _place(places[which]), places[which] & np.uint64(2**_COIN_BITS - 1)
    numbers[which] = _numbers(strips, strip, place, choices[which])
    more = draw(len(which))
    share = (place.astype(np.float64) + 0.5) * 2.0**-_PLACE_BITS
    chance = np.exp(-strips.curve * share * (2.0 * strip + share))
    uniform = (coin.astype(np.float64) + more.astype(np.float64) * 2.0**-64) * 2.0**-_COIN_BITS
    accepted: npt.NDArray[np.bool_] = uniform < chance
    for at in np.flatnonzero(np.abs(uniform - chance) < _DOUBT):
        bits = (int(coin[at]) << 64) + int(more[at])
        accepted[at] = strips.is_accepted(int(strip[at]), int(place[at]), bits, draw)
    return accepted


@dataclass(frozen=True, eq=False)
class _Strips:
    """Intervals of equal width (strips) from which rejection sampling draws, with their probabilities, for one σ.

    Attributes:
        width: width w of a strip in standard deviations.
        shift: log2 of the number of grid steps in a strip.
        ends: floor(2⁶³ P(strip ≤ b)) for the strips b of the table.
        guide: for each value of the 12 highest of 63 bits, the first possible strip.
    """

    width: Fraction
    shift: int
    ends: Words
    guide: npt.NDArray[np.int32]

    @property
    def curve(self) -> float:
        """w²/2 for strips of width w, rounded up so that the first pass never accepts wrongly."""
        return float(self.width**2 / 2) * (1 + 2.0**-40)

    def strip_of(self, choice: int, draw: Draw) -> int:
        """Return the strip that 63 random bits select; draws more bits where 63 do not decide."""
        bits = 63
        while True:
            choice, bits = (choice << 64) + int(draw(1)[0]), bits + 64
            found = self._strip_between(choice, bits)
            if found is not None:
                return found

    def _strip_between(self, choice: int, bits: int) -> int | None:
        """Return the only strip that these first bits of a uniform number allow; None if they allow several."""
        with localcontext() as context:
            context.prec = bits // 3 + 30
            masses = _masses(self.width, Decimal(2) ** -(bits + 40))
            total, below, doubt = sum(masses), Decimal(0), Decimal(2) ** -(bits + 20)
            low, high = Decimal(choice) / 2**bits, Decimal(choice + 1) / 2**bits
            for strip, mass in enumerate(masses):
                end = (below + mass) / total
                if high < end - doubt:
                    return strip if low > below / total + doubt or strip == 0 else None
                below += mass
        return None

    def is_accepted(self, strip: int, place: int, coin: int, draw: Draw) -> bool:
        """Return whether a uniform number is below the acceptance probability at a place in a strip.

        Args:
            strip: b.
            place: the first 48 bits of u.
            coin: the first 80 bits of the uniform number.
            draw: source of further bits of both numbers.
        """
        place_bits, coin_bits = _PLACE_BITS, _COIN_BITS + 64
        while True:
            place, coin = (place << 64) + int(draw(1)[0]), (coin << 64) + int(draw(1)[0])
            place_bits, coin_bits = place_bits + 64, coin_bits + 64
            with localcontext() as context:
                context.prec = coin_bits // 3 + 30
                doubt = Decimal(2) ** -(coin_bits + 20)
                least = self._chance(strip, Fraction(place + 1, 2**place_bits)) - doubt
                most = self._chance(strip, Fraction(place, 2**place_bits)) + doubt
                if Decimal(coin + 1) / 2**coin_bits <= least:
                    return True
                if Decimal(coin) / 2**coin_bits >= most:
                    return False

    def _chance(self, strip: int, share: Fraction) -> Decimal:
        fall = self.width**2 * share * (2 * strip + share) / 2
        return (-_decimal(fall)).exp()


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _masses(width: Fraction, least: Decimal) -> list[Decimal]:
    """Return the strips' unnormalised probabilities exp(-(b w)²/2) for b = 0, 1, …, down to ``least``."""
    ratio = (-_decimal(width**2) / 2).exp()
    square, factor, mass, masses = ratio * ratio, ratio, Decimal(1), []
    while mass >= least:
        masses.append(mass)
        mass, factor = mass * factor, factor * square
    return masses


@lru_cache(maxsize=16)
def _strips(stddev: float) -> _Strips:
    sigma = Fraction(stddev)
    shift = int(sigma / _STRIPS_PER_STDDEV).bit_length() - 1
    width = 2**shift / sigma
    with localcontext() as context:
        context.prec = 60
        masses = _masses(width, Decimal(10) ** -50)
        scale, below, ends = Decimal(2**63) / sum(masses), Decimal(0), []
        for mass in masses[: int(_TABLE_END / width)]:
            below += mass
            ends.append(int(below * scale))
    table = np.array(ends, np.uint64)
    firsts = np.arange(1 << 12, dtype=np.uint64) << np.uint64(51)
    guide = np.searchsorted(table, firsts, side="right").astype(np.int32)
    return _Strips(width, shift, table, guide)
