"""Drawing without replacement with unequal weights, exactly as many as asked for.

    take the size smallest of  E_i / w_i,   E_i ~ Exp(1)

Source: Efraimidis and Spirakis 2006, Information Processing Letters 97(5), algorithm A. The result
has the law of drawing one after the other, each time with probability w_i / Σ w over those that are
left; it never comes out short, unlike drawing with replacement and dropping what is there twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fl_lightning.data.cohorts.population import ClientIds, Numbers


def weighted_draw(log_weights: Numbers, size: int, generator: np.random.Generator) -> ClientIds:
    """Return distinct positions, increasing.

    Args:
        log_weights: the logarithm of each weight, shape (n,); -inf for weight 0, which is drawn,
            all such alike, only when nothing else is left.
        size: how many; at most n come.
        generator: what is drawn from: n numbers, whatever the weights.

    Example:
        >>> weights = np.array([1.0, 0.0, 5.0, 1.0])
        >>> with np.errstate(divide="ignore"):
        ...     logs = np.log(weights)
        >>> weighted_draw(logs, 3, np.random.default_rng(0))
        array([0, 2, 3])
    """
    draws: npt.NDArray[np.float64] = np.log(generator.standard_exponential(len(log_weights)))
    size = min(size, len(draws))
    if not size:
        return np.empty(0, np.int64)
    keys = draws - log_weights
    if np.count_nonzero(np.isfinite(keys)) < size:  # those of weight 0 by their own draws
        order = np.lexsort((draws, keys))
    else:
        order = np.argpartition(keys, size - 1)
    return np.sort(order[:size])


def log_of(weights: npt.NDArray[np.generic]) -> Numbers:
    """Return logarithms of weights ≥ 0, -inf of 0."""
    with np.errstate(divide="ignore"):
        logs: Numbers = np.log(weights.astype(np.float64))
    return logs
