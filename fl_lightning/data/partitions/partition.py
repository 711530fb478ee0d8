"""Partitions: the protocol, those that ignore classes, and the split that holds out examples of every class.

    assign(labels, num_clients, seed) -> [indices of client 0, indices of client 1, …]

The index arrays are disjoint and together contain every position of ``labels`` once. A rule is a pure
function of its arguments; each shard is in ascending order (training shuffles by itself). The rules
here return `FlatShards`, which read like a list and hold a million clients in one array; a user's rule
may return a list as well, or shards that overlap. Partitions by label are in `label_shards` and
`dirichlet_labels`.

The stratified split holds out a fraction f of the examples, of every class equally:

    held out of class c = floor(f n_c), or one more if the remainder of f n_c is among the largest

so that the parts sum to round(f N) and every class keeps its proportion up to one example (the
largest-remainder method, which parliaments use for seats).

Two partitions give clients different numbers of examples with the same distribution:

    DirichletSizes   shares ~ Dir_K(alpha)
    PowerLawSizes    share of the r-th largest client ∝ r^-exponent,  r = 1 … K

Sizes are the shares times N, rounded by largest remainder, so that all N examples are used; the
examples of a client are drawn uniformly.

Sources: Li et al. 2022, *Federated Learning on Non-IID Data Silos* (2102.02079), quantity skew;
Li et al. 2020, *Federated Optimization in Heterogeneous Networks* (1812.06127), section 5, whose
devices' sizes follow a power law.
Differs: clients below ``min_examples`` are raised to it and the others shrink in proportion (the first
source draws again, and may never end for a small alpha).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Ranged, check_range
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.columns import Column, name_of
from fl_lightning.data.shards import FlatShards

MIN_ALPHA, MAX_ALPHA = 1e-100, 1e100  # of floating point; far beyond any visible effect


class Partition(Protocol):
    """A rule that gives every example to exactly one client.

    A rule that does not read labels may have a class attribute ``uses_labels = False``, so that it also
    divides data without labels. A rule that reads another column names it in an attribute ``attribute``,
    like `NaturalPartition`.

    Example:
        >>> class InTurn:
        ...     uses_labels = False
        ...     def assign(self, labels, num_clients, seed):
        ...         return [np.arange(k, len(labels), num_clients) for k in range(num_clients)]
        >>> InTurn().assign(np.zeros(5), num_clients=2, seed=0)
        [array([0, 2, 4]), array([1, 3])]
    """

    # Any: the command line compares annotations by letter, and these may say list or FlatShards
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> Any:
        """Return an integer array of example indices for each client; every example is in exactly one array.

        A list of arrays, or for many clients `FlatShards`.

        Args:
            labels: one sortable value per example, shape (N,); they need not be contiguous.
            num_clients: number of shards, in [1, N].
            seed: seed of the run; the same seed gives the same partition.

        Raises:
            ConfigurationError: if the rule is impossible for these labels and clients.
        """
        ...


@final
@dataclass(frozen=True)
class IID(Partition):
    """Gives every client a random sample of the examples; the clients' sizes differ by at most one.

    Example:
        >>> shards = IID().assign(np.zeros(10), num_clients=3, seed=0)
        >>> sorted(len(shard) for shard in shards)
        [3, 3, 4]
    """

    uses_labels: ClassVar[bool] = False

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        return shards_of(rng.permutation(len(labels)) % num_clients, num_clients)


@final
@dataclass(frozen=True)
class NaturalPartition(Partition):
    """Makes one client for each distinct value of a column, e.g. for each writer of handwritten letters.

    Clients are numbered in the sorted order of the values; there are no random draws.

    Args:
        attribute: the owner of each example: the name of an attribute of the data set, of a column, or
            of a key of its items; or a function of the data set, or its import path; or a list.

    Example:
        >>> writers = np.array(["bo", "al", "bo", "cy"])
        >>> list(NaturalPartition(attribute="writer").assign(writers, num_clients=3, seed=0))
        [tensor([1]), tensor([0, 2]), tensor([3])]
    """

    attribute: Column

    def __post_init__(self) -> None:
        if isinstance(self.attribute, str) and not self.attribute:
            raise ConfigurationError("attribute must name a column of the data, got an empty text")

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return the indices of each client's examples; ``labels`` are the column's values, one per example."""
        check_sizes(labels, num_clients)
        if labels.dtype.kind == "f" and len(broken := labels[labels != np.floor(labels)]):
            raise ConfigurationError(
                f"attribute must name owners, by text or whole number, and {name_of(self.attribute)} has "
                f"real numbers such as {broken[0]:g}: give another column"
            )
        values, owner = np.unique(labels, return_inverse=True)
        if len(values) != num_clients:
            raise ConfigurationError(
                f"num_clients must equal the number of distinct values of {name_of(self.attribute)}, "
                f"got {num_clients}: set num_clients to {len(values)}"
            )
        return shards_of(owner, num_clients)


def check_sizes(labels: np.ndarray, num_clients: int) -> None:
    """Raise ConfigurationError if ``labels`` is not of shape (N,) or ``num_clients`` not in [1, N].

    Example:
        >>> check_sizes(np.zeros(3), num_clients=5)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: num_clients must be at most the number of \
examples, 3, got 5: more clients than examples. Lower num_clients or use more data
    """
    if labels.ndim != 1:
        raise ConfigurationError(
            f"labels must have shape (N,), one per example, got shape {labels.shape}: "
            "pass one value per example"
        )
    check_range("num_clients", num_clients, "at least 1")
    if num_clients > len(labels):
        raise ConfigurationError(
            f"num_clients must be at most the number of examples, {len(labels)}, got "
            f"{num_clients}: more clients than examples. Lower num_clients or use more data"
        )


def check_smallest(min_examples: int, num_clients: int, total: int) -> None:
    """Raise ConfigurationError if there are too few examples to give each client ``min_examples``."""
    if min_examples * num_clients > total:
        raise ConfigurationError(
            f"min_examples must be at most {total // num_clients} ({total} examples over "
            f"{num_clients} clients), got {min_examples}: lower it or num_clients"
        )


def check_concentration(alpha: float) -> None:
    """Raise ConfigurationError if ``alpha`` of a Dirichlet distribution is too small or too large to compute with."""
    if not MIN_ALPHA <= alpha <= MAX_ALPHA:
        raise ConfigurationError(
            f"alpha must be in [{MIN_ALPHA:g}, {MAX_ALPHA:g}], got {alpha}: a small alpha makes clients differ, a "
            "large one makes them alike. For clients that are alike, use the partition IID"
        )


def shards_of(owner: np.ndarray, num_clients: int) -> FlatShards:
    """Return the indices of each client's examples, ascending, given the client that owns each example.

    Example:
        >>> list(shards_of(np.array([1, 0, 1]), num_clients=2))
        [tensor([1]), tensor([0, 2])]
    """
    sizes = np.bincount(owner, minlength=num_clients)
    return FlatShards(np.argsort(owner, kind="stable"), sizes)


def deal(counts: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> FlatShards:
    """Give client i ``counts[i, c]`` examples of class c, chosen at random.

    Args:
        counts: shape (num_clients, num_classes); column c sums to the size of class c.
        classes: the class of every example, in [0, num_classes), shape (N,).
        rng: generator of the random order within a class.

    Example:
        >>> counts = np.array([[2, 0], [0, 1]])
        >>> list(deal(counts, np.array([0, 1, 0]), np.random.default_rng(0)))
        [tensor([0, 2]), tensor([1])]
    """
    num_clients, num_classes = counts.shape
    shuffled = rng.permutation(len(classes))
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    owner = np.empty(len(classes), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    return shards_of(owner, num_clients)


def even_sizes(total: int, num_parts: int, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` into integers that differ by at most one, in random order.

    Example:
        >>> sorted(even_sizes(7, 3, np.random.default_rng(0)).tolist())
        [2, 2, 3]
    """
    return total // num_parts + (rng.permutation(num_parts) < total % num_parts)


def stratified_split(targets: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Hold out the same fraction of every class; return the kept and the held-out indices, both ascending.

    Args:
        targets: the class of each example, shape (N,).
        fraction: fraction to hold out, in [0, 1].
        seed: seed of the choice of examples; their numbers per class do not depend on it.

    Example:
        >>> kept, held_out = stratified_split(torch.tensor([0] * 6 + [1] * 3), 1 / 3, seed=0)
        >>> len(kept), (held_out < 6).sum().item(), (held_out >= 6).sum().item()
        (6, 2, 1)
    """
    random = numpy_generator(seed, "stratified split")
    labels = targets.numpy()
    classes, counts = np.unique(labels, return_counts=True)
    held_out = np.zeros(len(labels), dtype=bool)
    quotas = _rounded(counts * fraction, round(counts.sum() * fraction))
    for label, quota in zip(classes, quotas, strict=True):
        members = np.flatnonzero(labels == label)
        held_out[random.permutation(members)[:quota]] = True
    return torch.from_numpy(np.flatnonzero(~held_out)), torch.from_numpy(np.flatnonzero(held_out))


def _rounded(exact: np.ndarray, total: int) -> np.ndarray:
    """Round numbers to integers that sum to ``total``, by largest remainder."""
    sizes: np.ndarray = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]
    sizes[largest_remainders] += 1
    return sizes


@final
@dataclass(frozen=True, kw_only=True)
class DirichletSizes(Partition):
    """Gives clients unequal numbers of random examples; the sizes follow a symmetric Dirichlet distribution.

    Args:
        alpha: concentration, > 0: at 1e6 sizes are nearly equal, at 0.1 few clients have most examples.
        min_examples: smallest number of examples of a client, ≥ 1.

    Example:
        >>> shards = DirichletSizes(alpha=0.5).assign(np.zeros(100), num_clients=4, seed=0)
        >>> sum(len(shard) for shard in shards), min(len(shard) for shard in shards) >= 1
        (100, True)
    """

    uses_labels: ClassVar[bool] = False

    alpha: float
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_concentration(self.alpha)
        check_range("min_examples", self.min_examples, "at least 1")

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        shares = rng.dirichlet(np.full(num_clients, self.alpha))
        return _deal_sizes(proportional_sizes(shares, len(labels), self.min_examples), rng)


@final
@dataclass(frozen=True, kw_only=True)
class PowerLawSizes(Ranged, Partition):
    """Gives clients random examples, in numbers that fall as a power of the client's rank; ranks are random.

    Args:
        exponent: exponent ≥ 0: 0 gives equal sizes, 1 makes the second client half as large as the
            first.
        min_examples: smallest number of examples of a client, ≥ 1.

    Example:
        >>> shards = PowerLawSizes(exponent=1.0).assign(np.zeros(110), num_clients=3, seed=0)
        >>> sorted(len(shard) for shard in shards)
        [20, 30, 60]
    """

    uses_labels: ClassVar[bool] = False
    ranges: ClassVar[dict[str, str]] = {
        "exponent": "at least 0 and finite: 0 means equal sizes",
        "min_examples": "at least 1",
    }

    exponent: float
    min_examples: int = 1

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        shares = np.arange(1.0, num_clients + 1) ** -self.exponent
        sizes = proportional_sizes(shares, len(labels), self.min_examples)
        return _deal_sizes(rng.permutation(sizes), rng)


def proportional_sizes(shares: np.ndarray, total: int, min_examples: int) -> np.ndarray:
    """Compute client sizes in proportion to ``shares``: integers ≥ ``min_examples`` that sum to ``total``.

    Args:
        shares: shape (num_clients,), ≥ 0, any positive sum.
        total: number of all examples.
        min_examples: smallest size of a client.

    Raises:
        ConfigurationError: if ``total`` is too small for ``min_examples`` of each client.

    Example:
        >>> proportional_sizes(np.array([6.0, 3.0, 0.0]), 10, min_examples=1)
        array([6, 3, 1])
    """
    check_smallest(min_examples, len(shares), total)
    lifted = np.zeros(len(shares), dtype=bool)
    while True:  # ends, because each iteration lifts at least one more client
        rest = total - min_examples * lifted.sum()
        exact = np.where(lifted, min_examples, rest * shares / max(shares[~lifted].sum(), 1e-300))
        below = ~lifted & (exact < min_examples)
        if not below.any():
            break
        lifted |= below
    return _rounded(exact, total)


def _deal_sizes(sizes: np.ndarray, rng: np.random.Generator) -> FlatShards:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return shards_of(rng.permutation(owner), len(sizes))
