"""Parameters of CKKS that are safe, and large enough for a sum.

    log2 Q = Σ coefficient bits ≤ the most that N carries at 128 bits of security

Nothing is multiplied, so that a ciphertext's modulus holds the sum and the scale alone: the larger the
scale, the smaller the scheme's error, and the less noise has to hide it, see `flooded`.

Source of the limits: the Homomorphic Encryption Security Standard (Albrecht et al. 2018), table 1,
classical attackers, ternary secrets. Scheme: Cheon, Kim, Kim, Song 2017 (ASIACRYPT).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}


@dataclass(frozen=True, kw_only=True)
class CKKSParameters:
    """What all parties agree on.

    Args:
        degree: N, a power of two from 1024 to 32768; a ciphertext holds N / 2 numbers.
        coefficient_bits: of the primes of the modulus, each from 20 to 60. The last one is for
            keys only; ciphertexts are modulo the others.
        scale_bits: numbers are multiplied by 2^scale_bits and rounded.

    Raises:
        ValueError: if they are unsafe or leave no room for a sum.

    Example:
        >>> CKKSParameters().slots
        4096
        >>> CKKSParameters(coefficient_bits=(60, 60, 60, 60))
        Traceback (most recent call last):
        ...
        ValueError: coefficient_bits sum to 240, but degree 8192 carries at most 218 with 128 bits \
of security: use fewer or smaller primes, or degree 16384
    """

    degree: int = 8192
    coefficient_bits: tuple[int, ...] = (60, 40, 40)
    scale_bits: int = 80

    def __post_init__(self) -> None:
        if self.degree not in MOST_BITS:
            raise ValueError(f"degree must be one of {list(MOST_BITS)}, got {self.degree}")
        bits, most = sum(self.coefficient_bits), MOST_BITS[self.degree]
        if bits > most:
            larger = next((d for d, carried in MOST_BITS.items() if carried >= bits), None)
            raise ValueError(
                f"coefficient_bits sum to {bits}, but degree {self.degree} carries at most {most} "
                "with 128 bits of security: use fewer or smaller primes"
                + (f", or degree {larger}" if larger else "")
            )
        if not all(20 <= each <= 60 for each in self.coefficient_bits):
            raise ValueError(f"coefficient_bits must be from 20 to 60, got {self.coefficient_bits}")
        if len(self.coefficient_bits) < 2:
            raise ValueError(
                f"coefficient_bits must be at least two, got {self.coefficient_bits}: one for the "
                "sum, and the last for keys"
            )
        if not 10 <= self.scale_bits <= self._sum_bits - 4:
            raise ValueError(
                f"scale_bits must be from 10 to {self._sum_bits - 4}, four below all primes but the "
                f"last, which hold the sum, got {self.scale_bits}"
            )

    @property
    def slots(self) -> int:
        """How many numbers a ciphertext holds."""
        return self.degree // 2

    @property
    def largest(self) -> float:
        """Sums must be smaller, and so must be what is added up."""
        return 2.0 ** (self._sum_bits - self.scale_bits - 3)

    @property
    def _sum_bits(self) -> int:
        return sum(self.coefficient_bits[:-1])
