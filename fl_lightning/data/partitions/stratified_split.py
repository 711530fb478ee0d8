"""Hold out a fraction of the examples, of every class alike.

    held out of class c = floor(f n_c), or one more where the remainder of f n_c is among the largest

so that the parts sum to round(f N) and every class keeps its proportion to within one example
(the largest-remainder method, which parliaments use for seats).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeds import numpy_generator


def stratified_split(targets: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices kept and those held out, both ascending, together all of them.

    Args:
        targets: the class of each example, shape (N,).
        fraction: part to hold out, in [0, 1].
        seed: which examples of a class are held out depends on it, how many does not.

    Example:
        >>> kept, held_out = stratified_split(torch.tensor([0] * 6 + [1] * 3), 1 / 3, seed=0)
        >>> len(kept), (held_out < 6).sum().item(), (held_out >= 6).sum().item()
        (6, 2, 1)
    """
    random = numpy_generator(seed, "stratified split")
    labels = targets.numpy()
    classes, counts = np.unique(labels, return_counts=True)
    held_out = np.zeros(len(labels), dtype=bool)
    for label, quota in zip(classes, _quotas(counts, fraction), strict=True):
        members = np.flatnonzero(labels == label)
        held_out[random.permutation(members)[:quota]] = True
    return torch.from_numpy(np.flatnonzero(~held_out)), torch.from_numpy(np.flatnonzero(held_out))


def _quotas(counts: np.ndarray, fraction: float) -> np.ndarray:
    """Return how many of each class to hold out, by largest remainder."""
    exact = counts * fraction
    quotas = np.floor(exact).astype(np.int64)
    missing = round(counts.sum() * fraction) - quotas.sum()
    quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    return quotas
