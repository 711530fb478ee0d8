"""How much privacy one run has lost at least: many canaries, each in it or not by a coin.

    P[v or more of r guesses right] ≤ β + 2 m δ max_i P[v > B ≥ v - i] / i,    β = P[B ≥ v],
    B ~ Binomial(r, e^ε / (1 + e^ε)),    for every ε-δ-private run of m canaries

Whoever sees the result scores all canaries and guesses that those with the highest scores were in
it and those with the lowest were not, and abstains from the rest. Each right guess is evidence: an
ε under which so many are too unlikely is refuted. Canaries are independent coins, so that one run
is as good as m. Source: Steinke, Nasr and Jagielski 2023 (2305.08846), Theorem 5.2; canary clients
with random directions are those of Andrew et al. 2023 (2302.03098), Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

_MOST = 50.0


def chance_of_guesses(
    right: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Return an upper bound of the chance that an ε-δ-private run allows so many right guesses.

    Args:
        right: guesses that are right, v.
        guesses: in all, r, from v to m.
        canaries: m.
        epsilon: ≥ 0.
        delta: in [0, 1).

    Example:
        >>> round(chance_of_guesses(10, 10, 100, epsilon=0.0, delta=0.0) * 2**10, 9)
        1.0
    """
    rate = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, rate))
    if delta == 0 or right == 0:
        return min(1.0, beta)
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, rate))
    steepest = float((below / np.arange(1, right + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * steepest)


def epsilon_of_guesses(
    right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """Return an ε that the truth is not below, with so much confidence; 0 if nothing is known.

    Args:
        right: guesses that are right.
        guesses: in all, their number chosen before looking.
        canaries: in the run or not, each by a fair coin.
        delta: in [0, 1).
        confidence: in (0, 1).

    Example:
        >>> round(epsilon_of_guesses(100, 100, 1000, delta=1e-5), 2)
        3.47
        >>> epsilon_of_guesses(50, 100, 1000, delta=1e-5)
        0.0
    """
    low, high = 0.0, _MOST
    risk = 1 - confidence
    if chance_of_guesses(right, guesses, canaries, low, delta) > risk:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if chance_of_guesses(right, guesses, canaries, middle, delta) > risk:
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class Guesses:
    """What an observer of one run made of it.

    Attributes:
        right: guesses that were right.
        guesses: in all.
        canaries: in the run or not.
    """

    right: int
    guesses: int
    canaries: int

    def epsilon(self, delta: float, confidence: float = 0.95) -> float:
        """Return the lower bound, see `epsilon_of_guesses`."""
        return epsilon_of_guesses(self.right, self.guesses, self.canaries, delta, confidence)


def guesses_by_score(
    scores: npt.NDArray[np.float64], is_in: npt.NDArray[np.bool_], share: float
) -> Guesses:
    """Guess the canaries with the highest scores to be in the run, those with the lowest not.

    Args:
        scores: of all canaries, expected to be higher of those in the run, shape (m,).
        is_in: which were, by fair coins, shape (m,).
        share: of the canaries that are guessed, in (0, 1], half of them at either end; chosen
            before looking.

    Example:
        >>> guesses_by_score(np.array([3.0, 0.1, -2.0, 0.2]), np.array([True, False, False, True]), 0.5)
        Guesses(right=2, guesses=2, canaries=4)
    """
    order, count = np.argsort(scores), max(1, round(share * len(scores) / 2))
    right = int(is_in[order[-count:]].sum()) + int((~is_in[order[:count]]).sum())
    return Guesses(right, 2 * count, len(scores))
