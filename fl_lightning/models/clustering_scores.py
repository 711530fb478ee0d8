"""How clusters agree with known classes, from the table of how often they meet.

    n_ij: examples of class i in cluster j,   H: entropy,   I: mutual information of the table
    homogeneity = I / H(classes),   completeness = I / H(clusters),   v = their harmonic mean
    adjusted Rand = 2 (TP TN - FN FP) / ((TP + FN)(FN + TN) + (TP + FP)(FP + TN))    over pairs

An entropy of 0 makes its score 1. Sources: Rosenberg and Hirschberg 2007, EMNLP, *V-measure*,
section 2; Hubert and Arabie 1985, *Comparing partitions*, equation 5, in the pair counts of
Steinley 2004. The table is a sum over examples: over batches, clients or processes it adds up, so
that a score is that of the pooled examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core.errors import ConfigurationError


def homogeneity(table: Tensor) -> Tensor:
    """Homogeneity in [0, 1]: 1 if every cluster has examples of one class only.

    Example:
        >>> homogeneity(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]))
        tensor(1.)
    """
    return _share(_information(table), _entropy(table.sum(1)))


def completeness(table: Tensor) -> Tensor:
    """Completeness in [0, 1]: 1 if every class is in one cluster only.

    Example:
        >>> completeness(torch.tensor([[2.0, 0.0], [3.0, 0.0]]))
        tensor(1.)
    """
    return _share(_information(table), _entropy(table.sum(0)))


def v_measure(table: Tensor) -> Tensor:
    """Harmonic mean of homogeneity and completeness, in [0, 1]."""
    one, other = homogeneity(table), completeness(table)
    return 2 * one * other / (one + other).clamp(min=torch.finfo(table.dtype).tiny)


def adjusted_rand(table: Tensor) -> Tensor:
    """Adjusted Rand index: at most 1, and 0 on average for random clusters."""
    same = table.square().sum()
    by_class, by_cluster = table.sum(1).square().sum(), table.sum(0).square().sum()
    total = table.sum()
    both = same - total
    class_only, cluster_only = by_class - same, by_cluster - same
    neither = total * total - by_class - by_cluster + same
    numerator = 2 * (both * neither - class_only * cluster_only)
    denominator = (both + class_only) * (class_only + neither)
    denominator = denominator + (both + cluster_only) * (cluster_only + neither)
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1), 1.0)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "homogeneity": homogeneity,
    "completeness": completeness,
    "v_measure": v_measure,
    "adjusted_rand": adjusted_rand,
}


class ClusteringScore(Metric):
    """One of the scores as a torchmetrics object.

    Args:
        score: name of the score in `SCORES`.
        num_labels: number of classes.
        num_clusters: number of clusters.

    Example:
        >>> metric = ClusteringScore("v_measure", num_labels=2, num_clusters=2)
        >>> metric.update(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]))
        >>> metric.compute()
        tensor(1.)
    """

    full_state_update = False
    table: Tensor

    def __init__(self, score: str, num_labels: int, num_clusters: int, **options: Any) -> None:
        super().__init__(**options)
        self._score = SCORES[score]
        self.add_state("table", torch.zeros(num_labels, num_clusters), dist_reduce_fx="sum")

    def update(self, clusters: Tensor, labels: Tensor) -> None:
        """Count examples by class and cluster; both shape (B,).

        Raises:
            ConfigurationError: if a label is not below ``num_labels``.
        """
        num_labels, num_clusters = self.table.shape
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_labels:
            raise ConfigurationError(
                f"KMeans: labels must be from 0 to {num_labels - 1}, got {int(labels.min())} to "
                f"{int(labels.max())}: set num_labels"
            )
        cells = (labels * num_clusters + clusters).flatten()
        counts = torch.bincount(cells, minlength=self.table.numel())
        self.table += counts.reshape(self.table.shape).to(self.table.dtype)

    def compute(self) -> Tensor:
        """Return the score of all examples so far."""
        wide = torch.float32 if self.table.device.type == "mps" else torch.float64
        return self._score(self.table.to(wide)).float()


def _entropy(counts: Tensor) -> Tensor:
    shares = counts / counts.sum().clamp(min=1)
    entropy: Tensor = -torch.special.xlogy(shares, shares).sum()
    return entropy


def _information(table: Tensor) -> Tensor:
    return _entropy(table.sum(0)) + _entropy(table.sum(1)) - _entropy(table.flatten())


def _share(information: Tensor, entropy: Tensor) -> Tensor:
    share = information / entropy.clamp(min=torch.finfo(entropy.dtype).tiny)
    return torch.where(entropy > 1e-12, share.clamp(0, 1), 1.0)
