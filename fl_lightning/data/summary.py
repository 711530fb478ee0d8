"""Summary of a partition: clients' sizes and classes as text, table and hash.

    entropy of client i in bits = -Σ_c p_ic log2 p_ic,   p_ic = counts[i, c] / sizes[i]

It is 0 for a client with one class and log2(C) for one with C classes in equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.shards import BLOCK, FlatShards

if TYPE_CHECKING:
    from pandas import DataFrame


def partition_fingerprint(shards: Sequence[Any]) -> str:
    """Return a hash of a partition, i.e. of every client's example indices and their order.

    Example:
        >>> one = partition_fingerprint([np.array([0, 1]), np.array([2])])
        >>> one == partition_fingerprint([np.array([0]), np.array([1, 2])])
        False
    """
    flat = FlatShards.of(shards)
    digest = blake2b(digest_size=16)
    digest.update(flat.num_examples.astype("<i8").tobytes())
    for start in range(0, len(flat.indices), BLOCK):  # saves a copy with eight bytes per index
        digest.update(flat.indices[start : start + BLOCK].astype("<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Counts of each client's examples, by class; created by `PartitionSummary.of`.

    Attributes:
        counts: number of examples of each class at each counted client, (num_counted, num_classes);
            without columns if examples have no classes.
        classes: label of each column, shape (num_classes,).
        fingerprint: `partition_fingerprint` of the shards.
        clients: clients whose classes were counted, shape (num_counted,): all if they are few.
        sizes: number of examples of every client, counted or not, shape (num_clients,).

    Example:
        >>> labels = np.array([0, 0, 1, 1])
        >>> summary = PartitionSummary.of([np.array([0, 1]), np.array([2, 3])], labels)
        >>> summary.counts.tolist(), summary.label_entropy.tolist()
        ([[2, 0], [0, 2]], [0.0, 0.0])
    """

    counts: np.ndarray
    classes: np.ndarray
    fingerprint: str
    clients: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(
        cls,
        shards: Sequence[Any],
        labels: np.ndarray | None,
        *,
        max_clients: int | None = None,
    ) -> PartitionSummary:
        """Count each client's examples, by class.

        Args:
            shards: positions in ``labels`` per client.
            labels: one label per example, shape (N,); None if examples have no classes.
            max_clients: largest number of clients whose classes are counted, evenly spaced by number;
                None for all. A million clients with a thousand classes would be a billion numbers.

        Raises:
            ConfigurationError: if there is no client.
        """
        if len(shards) == 0:
            raise ConfigurationError("shards must have at least one client, got none")
        flat = FlatShards.of(shards)
        clients = _evenly_spaced(len(flat), max_clients or len(flat))
        if labels is None:
            counts = np.zeros((len(clients), 0), np.int64)
            return cls(counts, np.empty(0), partition_fingerprint(flat), clients, flat.num_examples)
        classes, column = np.unique(labels, return_inverse=True)
        indices, num_counted = flat.take(clients)
        row = np.repeat(np.arange(len(clients)), num_counted)
        cell = row * len(classes) + column[indices]
        counts = np.bincount(cell, minlength=len(clients) * len(classes))
        counts = counts.reshape(len(clients), -1)
        return cls(counts, classes, partition_fingerprint(flat), clients, flat.num_examples)

    @property
    def classes_per_client(self) -> np.ndarray:
        """Number of distinct classes per client, shape (num_counted,), for clients whose classes were counted."""
        return np.asarray((self.counts > 0).sum(axis=1))

    @property
    def label_entropy(self) -> np.ndarray:
        """Entropy in bits of each counted client's classes, in [0, log2(C)]; 0 for a client without examples."""
        share = self.counts / np.maximum(self.counts.sum(axis=1), 1)[:, None]
        logarithm = np.log2(share, out=np.zeros_like(share), where=share > 0)
        return np.asarray(np.abs((share * logarithm).sum(axis=1)))  # abs: no "-0.0"

    def as_line(self) -> str:
        """Summarise in one line how many examples and classes clients have.

        Example:
            >>> shards = [np.array([0, 1]), np.array([2, 3, 4])]
            >>> PartitionSummary.of(shards, np.array([0, 0, 1, 1, 1])).as_line()
            '2 clients with 2 to 3 examples, 5 in all; 1 of 2 classes each'
        """
        sizes = f"{_range(self.sizes)} examples, {self.sizes.sum():,} in all"
        line = f"{len(self.sizes):,} clients with {sizes}"
        if not len(self.classes):
            return line
        return f"{line}; {_range(self.classes_per_client)} of {len(self.classes)} classes each"

    def as_text(self) -> str:
        """Summarise in a few lines how many examples and classes clients have, and their label entropy."""
        rows = {
            "examples per client": (self.sizes, ".0f"),
            "classes per client": (self.classes_per_client, ".0f"),
            "label entropy (bits)": (self.label_entropy, ".2f"),
        }
        classes = f"{len(self.classes)} classes" if len(self.classes) else "no classes"
        lines = [f"{len(self.sizes)} clients, {self.sizes.sum()} examples, {classes}"]
        if not len(self.classes):
            rows = {"examples per client": rows["examples per client"]}
        elif len(self.clients) < len(self.sizes):
            lines[0] += f" (classes and entropy of {len(self.clients)} clients, evenly spaced)"
        for name, (values, form) in rows.items():
            least, middle, most = (format(f(values), form) for f in (np.min, np.median, np.max))
            lines.append(f"  {name:<21} min {least}, median {middle}, max {most}")
        return "\n".join([*lines, f"  fingerprint           {self.fingerprint}"])

    def table(self) -> DataFrame:
        """Return a table of class counts, with one row per client whose classes were counted."""
        import pandas  # half a second to import

        table = pandas.DataFrame(self.counts, columns=[f"class_{name}" for name in self.classes])
        table.insert(0, "client", self.clients)
        table.insert(1, "num_examples", self.sizes[self.clients])
        table.insert(2, "num_classes", self.classes_per_client)
        table.insert(3, "label_entropy_bits", self.label_entropy)
        return table

    def save(self, path: str | Path) -> None:
        """Write the table of clients' class counts as a CSV file, and create missing folders."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.table().to_csv(path, index=False, float_format="%.6f")


def _range(numbers: np.ndarray) -> str:
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most ``most`` integers in [0, count), evenly spaced."""
    shown = min(count, most)
    return np.arange(shown) * count // shown
