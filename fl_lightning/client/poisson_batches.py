"""Local batches for private training: every example joins every step by its own coin.

    P(example in step) = q = min(1, B / n), independently of all other examples and steps

The sampling that the accounting of DP-SGD assumes; a pass over a shuffled shard is another one. A
batch may be empty. Source: Abadi et al. 2016 (1607.00133), Section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.whole_numbers import Words


def poisson_batches(
    shard: Tensor, batch_size: int, num_steps: int, words: Callable[[int], Words]
) -> tuple[Tensor, list[int]]:
    """Return which examples a client's local steps see, one after the other, and their sizes.

    Args:
        shard: the client's indices, shape (n,).
        batch_size: expected examples of a step, B ≥ 1; all of a shard that has no more.
        num_steps: ≥ 0.
        words: by the number of a step, n uniform words of 64 bits.

    Example:
        >>> def words(step):
        ...     return np.random.default_rng(step).integers(0, 2**64, 6, dtype=np.uint64)
        >>> poisson_batches(torch.arange(6), 2, 3, words)
        (tensor([1, 2, 3, 2, 4, 0, 1, 3]), [3, 2, 3])
    """
    num_examples = shard.shape[0]
    if num_examples <= batch_size:
        return shard.repeat(num_steps), [num_examples] * num_steps
    below = np.uint64(batch_size / num_examples * 2.0**64)
    chosen = [torch.from_numpy(np.flatnonzero(words(step) < below)) for step in range(num_steps)]
    parts = [shard[places] for places in chosen]
    return torch.cat([shard[:0], *parts]), [len(part) for part in parts]
