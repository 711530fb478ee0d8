"""Aggregators of low-rank adapters, also of clients with different ranks.

A layer computes W + s B A, with A of shape (r, in), B of shape (out, r). Client i trains the first r_i
rows of A and columns of B; missing ones count as 0. p_i = n_i / Σ n, and M = Σ p_i B_i A_i is the mean of
products.

    FedIT      A = Σ p_i A_i, B = Σ p_i B_i        `Mean`; biased: B A is not M
    HetLoRA    A = Σ w_i A_i, B = Σ w_i B_i        w_i = ‖B_i A_i‖_F / Σ ‖B_j A_j‖_F over all layers
    FlexLoRA   B A = M in its r largest singular values:   M = U Σ Vᵀ,  B = U_r Σ_r,  A = V_rᵀ
    FedEx      A, B as FedIT;  W ← W + s (M - B A)         so that W + s B A is exact
    FLoRA      W ← W + s M;    A new at random, B = 0      exact; the products of stacked factors

Other parameters (heads, magnitudes) get the weighted mean. Sources: Zhang et al. 2024, "Towards Building the
Federated GPT" (FedIT); Cho et al. 2024 (2401.06432); Bai et al. 2024 (2402.11505); Singhal et al. 2024
(2410.09432), which weighs clients alike; Wang et al. 2024 (2409.05976).
Differs: s is that of the whole rank for every client. HetLoRA's clients have no penalty on the last ranks, and
the server sees from their updates whether these shrank. FlexLoRA keeps the row of A where M has fewer ranks than r.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import KeptUpdates

_OF_ADAPTERS = Traits(
    needs={
        Trait.SIMULATION: "changes frozen weights or truncates adapters, which a server cannot do at sites",
        Trait.COHORTS: "combines the adapters of clients that start from the same model",
        Trait.ALL_PARAMETERS: "multiplies whole matrices",
    },
    instead={
        Trait.SIMULATION: "use Mean",
        Trait.COHORTS: "leave asynchronous out, or use Mean",
        Trait.ALL_PARAMETERS: "leave the mask out, or use Mean",
    },
)


@dataclass(frozen=True)
class Pair:
    """Positions of the two factors of one LoRA adapter, A and B, in a vector of parameters."""

    a: slice  # entries of A, of shape (rank, columns), in the vector
    b: slice  # entries of B, of shape (rows, rank), in the vector
    rank: int  # r, that of the global model
    scale: float = 1.0  # s, the factor of B A in the layer's weight

    def factors(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors A, shape (n, r, in), and B, shape (n, out, r), in n parameter vectors, shape (n, k)."""
        n = len(vectors)
        a = vectors[:, self.a].reshape(n, self.rank, -1)
        return a, vectors[:, self.b].reshape(n, -1, self.rank)

    def keep(self, vectors: Tensor, ranks: Sequence[int]) -> None:
        """Set the factors' entries beyond each client's rank to zero, in place, in vectors of shape (n, k)."""
        for vector, rank in zip(vectors, ranks, strict=True):
            vector[self.a].view(self.rank, -1)[rank:] = 0
            vector[self.b].view(-1, self.rank)[:, rank:] = 0


# new A and B of an adapter, and the change of the layer's frozen weight divided by s, (out, in), or None
Combined = tuple[Tensor, Tensor, Tensor | None]


class AdapterAggregator(KeptUpdates):
    """Base of aggregators that combine the clients' LoRA adapters; subclasses define `combine`.

    Attributes:
        ranks: rank of client i is ``ranks[i % len(ranks)]``; None if all clients have the whole rank.
        tiers: index into ``ranks`` for each client, by the speed of its device; None without devices.
        changes_base: whether the frozen weights of the layers change.
        pairs: the adapters, set when a fit starts.
    """

    ranks: Sequence[int] | None = None
    tiers: Sequence[int] | None = None
    changes_base: bool = False
    weight_by_examples = True
    pairs: Sequence[Pair] = ()
    _changes: list[Tensor | None] | None = None

    @property
    @override
    def traits(self) -> Traits:
        return super().traits | _OF_ADAPTERS

    def rank_of(self, client: int) -> int | None:
        """Return the rank of a client's adapters; None for the rank of the global model's."""
        if self.ranks is None:
            return None
        return self.ranks[client % len(self.ranks) if self.tiers is None else self.tiers[client]]

    @property
    def num_stacked(self) -> int:
        """Number of values in all clients' factors whose products changed the frozen weights in the last round."""
        return int(self.memory.get("stacked", 0))

    @override
    def start_round(self, round_index: int) -> None:
        self._round_index = round_index

    def open(self, like: Tensor) -> None:
        """Start a round from the current parameters ``like``, shape (k,)."""
        self._start, self._rows = like, self.new_rows(like)

    @override
    def add(self, update: ClientUpdate) -> None:
        self._rows.append(update)

    def close(self) -> Tensor:
        """Combine the clients' adapters, and return old minus new parameters, shape (k,)."""
        rows, start = self._rows, self._start.detach().cpu().double()
        deltas = torch.from_numpy(np.concatenate([block for _, block in rows.blocks()], axis=1))
        ends = start - deltas.double()
        ranks = [self.rank_of(client) for client in rows.client_ids]
        for pair in self.pairs:
            pair.keep(ends, [pair.rank if rank is None else rank for rank in ranks])
        examples = torch.as_tensor(rows.num_examples).double()
        weights = self.weights(ends, examples / examples.sum())
        new = start - weights @ deltas.double()
        self._changes = []
        for pair in self.pairs:
            a, b, change = self.combine(pair, *pair.factors(ends), weights)
            new[pair.a], new[pair.b] = a.flatten(), b.flatten()
            self._changes.append(None if change is None else pair.scale * change)
        if self.changes_base:
            sizes = [
                (pair.rank, (pair.b.stop - pair.b.start + pair.a.stop - pair.a.start) // pair.rank)
                for pair in self.pairs
            ]
            numbers = sum(
                min(rank or whole, whole) * size for whole, size in sizes for rank in ranks
            )
            self.memory["stacked"] = torch.tensor(numbers)
        self.finish(ends, rows.client_ids)
        del self._rows
        return (start - new).to(self._start)

    def weights(self, ends: Tensor, shares: Tensor) -> Tensor:
        """Return the weight of each client, shape (n,), by default its share of the examples."""
        return shares

    @abstractmethod
    def combine(self, pair: Pair, a: Tensor, b: Tensor, weights: Tensor) -> Combined:
        """Combine all clients' factors A, shape (n, r, in), and B, shape (n, out, r), of one adapter."""

    def finish(self, ends: Tensor, clients: Sequence[int]) -> None:
        """Called at the end of a round with the clients' parameters, shape (n, k)."""

    def take_changes(self) -> list[Tensor | None]:
        """Return and clear the changes of the adapted layers' frozen weights in the last round."""
        changes, self._changes = self._changes or [], None
        return changes


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("n,nij->ij", weights, values)


def _mean_product(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the clients' products B A, shape (out, in)."""
    return torch.einsum("n,nor,nri->oi", weights, b, a)


def _checked(owner: str, ranks: Sequence[int]) -> list[int]:
    if isinstance(ranks, int) or not ranks or min(ranks) < 1:
        raise ConfigurationError(
            f"{owner}: ranks must be a list of whole numbers ≥ 1, got {ranks}: client i has rank "
            "ranks[i % len(ranks)]"
        )
    return list(ranks)


@final
class HetLoRA(AdapterAggregator):
    """HetLoRA: means of zero-padded factors A and B, weighted by the Frobenius norms of the clients' B A.

    Args:
        ranks: rank of client i is ``ranks[i % len(ranks)]``, at most that of the model's adapters. With
            ``federation.devices`` ranks go by speed instead: each rank to equally many clients, the first rank
            to the slowest.
        prune: γ in (0, 1): if the rows of A and columns of B beyond γ r shrink at a client of rank r in a
            round, its rank is γ r from then on; None for constant ranks.

    Raises:
        ConfigurationError: for ranks below 1, or γ out of range.

    Example:
        >>> HetLoRA(ranks=[2, 4, 8]).rank_of(4)
        4
    """

    weight_by_examples = False  # but by norms

    def __init__(self, ranks: list[int], prune: float | None = None) -> None:
        self.ranks = _checked("HetLoRA", ranks)
        if prune is not None and not 0 < prune < 1:
            raise ConfigurationError(f"HetLoRA: prune must be in (0, 1), or null, got {prune}")
        self.prune = prune

    @override
    def rank_of(self, client: int) -> int | None:
        pruned = dict(self.memory["pruned"].tolist()) if "pruned" in self.memory else {}
        return int(pruned.get(client, super().rank_of(client) or 0))

    @override
    def weights(self, ends: Tensor, shares: Tensor) -> Tensor:
        squares = torch.zeros_like(shares)
        for pair in self.pairs:
            a, b = pair.factors(ends)
            squares += pair.scale**2 * (b @ a).square().sum((1, 2))
        total = squares.sqrt().sum()
        return squares.sqrt() / total if total > 0 else shares

    @override
    def combine(self, pair: Pair, a: Tensor, b: Tensor, weights: Tensor) -> Combined:
        return _mean(a, weights), _mean(b, weights), None

    @override
    def finish(self, ends: Tensor, clients: Sequence[int]) -> None:
        if self.prune is None:
            return
        start = self._start.detach().cpu().double().repeat(len(ends), 1)
        pruned = dict(self.memory["pruned"].tolist()) if "pruned" in self.memory else {}
        for row, client in enumerate(clients):
            rank = int(self.rank_of(client) or 0)
            kept = max(1, int(self.prune * rank))
            before, after = (self._tail(some[row], kept, rank) for some in (start, ends))
            if kept < rank and after < before:
                pruned[client] = kept
        if pruned:
            self.memory["pruned"] = torch.tensor(sorted(pruned.items()))

    def _tail(self, vector: Tensor, kept: int, rank: int) -> float:
        """Return Σ ‖B_(:, kept:rank)‖ ‖A_(kept:rank, :)‖ over all adapters, the size of what pruning removes."""
        total = 0.0
        for pair in self.pairs:
            a, b = (factor[0] for factor in pair.factors(vector[None]))
            total += float(b[:, kept:rank].norm() * a[kept:rank].norm())
        return total


@final
class FlexLoRA(AdapterAggregator):
    """FlexLoRA: the mean of the clients' B A, factorised by SVD; lower ranks keep the largest singular values.

    Args:
        ranks: as for `HetLoRA`.

    Example:
        >>> FlexLoRA(ranks=[2, 8]).rank_of(3)
        8
    """

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = _checked("FlexLoRA", ranks)

    @override
    def combine(self, pair: Pair, a: Tensor, b: Tensor, weights: Tensor) -> Combined:
        # QR of the stacked factors: no matrix of the layer's size is decomposed
        left = torch.cat([w * factor for w, factor in zip(weights, b, strict=True)], dim=1)
        ql, rl = torch.linalg.qr(left)
        qr, rr = torch.linalg.qr(torch.cat([*a]).T)
        u, values, vt = torch.linalg.svd(rl @ rr.T)
        # rounding only: directions without any product keep the old rows of A, and can still be learnt
        rank = int((values > values[:1].sum() * 1e-12).sum().clamp(max=pair.rank))
        new_a = pair.factors(self._start.detach().cpu().double()[None])[0][0].clone()
        new_b = torch.zeros_like(b[0])
        new_a[:rank] = vt[:rank] @ qr.T
        new_b[:, :rank] = ql @ (u[:, :rank] * values[:rank])
        return new_a, new_b, None


@final
class FedExLoRA(AdapterAggregator):
    """FedEx-LoRA: means of A and of B; the error of their product is added to the frozen weights.

    Example:
        >>> FedExLoRA().rank_of(3) is None
        True
    """

    changes_base = True

    @override
    def combine(self, pair: Pair, a: Tensor, b: Tensor, weights: Tensor) -> Combined:
        mean_a, mean_b = _mean(a, weights), _mean(b, weights)
        return mean_a, mean_b, _mean_product(a, b, weights) - mean_b @ mean_a


@final
class FLoRA(AdapterAggregator):
    """FLoRA: adds the mean of the clients' B A to the frozen weights, and restarts adapters every round.

    Args:
        ranks: as for `HetLoRA`.
        seed: seed of the new factors A, which are uniform in ±1 / √in, as in peft.

    Example:
        >>> FLoRA(ranks=[2, 4]).rank_of(0)
        2
    """

    changes_base = True

    def __init__(self, ranks: list[int], seed: int = 0) -> None:
        self.ranks, self.seed = _checked("FLoRA", ranks), seed

    @override
    def combine(self, pair: Pair, a: Tensor, b: Tensor, weights: Tensor) -> Combined:
        generator = torch.Generator().manual_seed(
            derive_seed(self.seed, "adapters", self._round_index, pair.a.start)
        )
        new = torch.rand(a.shape[1:], generator=generator, dtype=a.dtype) * 2 - 1
        return new / a.shape[2] ** 0.5, torch.zeros_like(b[0]), _mean_product(a, b, weights)
