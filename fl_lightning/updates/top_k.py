"""Top-k: only the numbers of largest magnitude are sent.

    T(x)_i = x_i if |x_i| is among the k largest, else 0

Source: Aji and Heafield 2017 (1704.05021); Stich et al. 2018 (1809.07599) for why it needs error
feedback. Of equal magnitudes the first ones are taken, so that the choice is the same everywhere;
numbers that are exactly zero are never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.updates.payload import Dense, Payload, Sparse
from fl_lightning.updates.transform import Transform, checked_fraction, num_kept, only_dense


@final
@dataclass(frozen=True)
class TopK(Transform):
    """Keeps the largest numbers. Biased: use it with `ErrorFeedback`.

    Args:
        fraction: of numbers that are kept, rounded to a whole number of at least one; 1 keeps all
            and changes nothing.

    Raises:
        ConfigurationError: if ``fraction`` is not in (0, 1].

    Example:
        >>> sparse = TopK(0.5).on_client(Dense(torch.tensor([1.0, -4.0, 0.0, 2.0])), seed=0)
        >>> sparse.to_dense()
        tensor([ 0., -4.,  0.,  2.])
    """

    fraction: float

    def __post_init__(self) -> None:
        checked_fraction(self.fraction)

    @property
    def name(self) -> str:
        """What it is."""
        return f"top-k {self.fraction:g}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Choose."""
        if self.fraction == 1:
            return payload
        values = only_dense(payload, self.name)
        kept = num_kept(values.numel(), self.fraction)
        if not kept:
            return payload
        sizes = values.abs()
        least = _smallest_kept(sizes, kept)
        indices = (sizes >= least).nonzero().flatten()
        if len(indices) > kept or not least:
            sure = (sizes > least).nonzero().flatten()
            ties = ((sizes == least) & (sizes > 0)).nonzero().flatten()[: kept - len(sure)]
            indices = torch.cat([sure, ties]).sort().values
        return Sparse(indices, Dense(values[indices]), values.numel())


def _smallest_kept(sizes: Tensor, kept: int) -> Tensor:
    at = sizes.numel() - kept
    if sizes.device.type == "cpu":  # where NumPy's selection is vectorised, five times as fast
        return torch.from_numpy(np.partition(sizes.numpy(), at)[at : at + 1])
    return sizes.kthvalue(at + 1).values
