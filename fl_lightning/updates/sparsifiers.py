"""Sparsifiers: some of the numbers are sent, the others count as zero.

Top-k: only the numbers of largest magnitude are sent.

    T(x)_i = x_i if |x_i| is among the k largest, else 0

Source: Aji and Heafield 2017 (1704.05021); Stich et al. 2018 (1809.07599) for why it needs error
feedback. Of equal magnitudes the first ones are taken, so that the choice is the same everywhere;
numbers that are exactly zero are never sent.

Random-k: numbers in random places are sent, and where they stand need not be said.

    T(x)_i = (d / k) x_i if i ∈ S, else 0         S: k of d places, drawn from the shared seed

Unbiased, because every place is drawn with probability k / d. Source: Konečný et al. 2016
(1610.05492), random mask; Stich et al. 2018 (1809.07599).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.traits import Trait, Traits
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
        """Name and options, as in the message's header."""
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


_AS_OPTION = Traits(
    needs={Trait.SINGLE_UPDATES: "draws other coordinates for every client"},
    instead={Trait.SINGLE_UPDATES: "give it to the aggregator, as random_k of SecureMean"},
)


@final
@dataclass(frozen=True)
class RandomK(Transform):
    """Keeps random numbers.

    Args:
        fraction: of numbers that are kept, rounded to a whole number of at least one; 1 keeps all
            and changes nothing.
        unbiased: scale what is kept by d / k. False for use with `ErrorFeedback`, which sends the
            others later.

    Raises:
        ConfigurationError: if ``fraction`` is not in (0, 1].

    Example:
        >>> half = RandomK(0.5)
        >>> payload = half.on_client(Dense(torch.tensor([1.0, 2.0, 3.0, 4.0])), seed=1)
        >>> payload.size
        2
        >>> half.on_server(payload, seed=1, size=4).to_dense()
        tensor([2., 0., 6., 0.])
    """

    fraction: float
    unbiased: bool = True

    def __post_init__(self) -> None:
        checked_fraction(self.fraction)

    @property
    def name(self) -> str:
        """Name and options, as in the message's header."""
        return f"random-k {self.fraction:g}{'' if self.unbiased else ' unscaled'}"

    @property
    def scaling(self) -> RandomK | None:
        """It, where it makes up for what it leaves out."""
        return self if self.unbiased and self.fraction < 1 else None

    @property
    def traits(self) -> Traits:
        """Traits of a transform; a secure sum can draw the same coordinates for all clients."""
        return super().traits | _AS_OPTION

    def sent_size(self, size: int) -> int:
        """Return how many numbers are sent."""
        return num_kept(size, self.fraction)

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Choose and scale."""
        if self.fraction == 1:
            return payload
        values = only_dense(payload, self.name)
        kept = values[self._indices(seed, values.numel()).to(values.device)]
        return Dense(kept * (values.numel() / max(1, len(kept))) if self.unbiased else kept)

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Put the numbers back in their places."""
        if self.fraction == 1:
            return payload
        values = payload.to_dense()
        return Sparse(self._indices(seed, size).to(values.device), Dense(values), size)

    def _indices(self, seed: int, size: int) -> Tensor:
        """Return the places of the smallest of as many random keys, in order.

        Of PCG64 the raw integers are promised to be the same in every version of NumPy; what makes
        choices and permutations out of them, there and in PyTorch, is not.
        """
        kept = num_kept(size, self.fraction)
        if not kept:
            return torch.empty(0, dtype=torch.int64)
        # all but certainly the smallest are among those below a little more than their share
        share = min(1.0, kept / size + 8 * np.sqrt(kept) / size + 64 / size)
        bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
        keys = np.random.PCG64(seed).random_raw(size)
        places = np.flatnonzero(keys <= bound)
        small = keys[places]
        largest = np.partition(small, kept - 1)[kept - 1]
        return torch.from_numpy(places[small <= largest][:kept])
