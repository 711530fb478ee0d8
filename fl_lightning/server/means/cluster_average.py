"""ClusterFedAvg: k-means over the clients' centroids, because these have no common order.

    {c'_1 … c'_k} = weighted k-means over all clients' centroids {c_ij},   weights: their members

The positional mean Σ_i c_ij / m is meaningless if cluster A of client 1 is cluster B of client 2.
New centroids are numbered so that their total distance to the current ones is smallest.

Source: the cluster aggregators of Sherpa.ai FL (Rodríguez-Barroso et al. 2020, 2007.00914), which
has neither a seed, nor restarts, nor weights; with weights it is the server's step of k-FED (Dennis
et al. 2021, 2103.00697) but for its initialisation. With one cluster it is the mean of the clients'
centroids by their members.
"""

from __future__ import annotations

import warnings
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import KeptUpdates
from fl_lightning.server.robust.matrix import UpdateRows

Points = npt.NDArray[np.float64]


def clustered(
    points: Points, sizes: Points, num_clusters: int, *, num_starts: int = 10, seed: int = 0
) -> Points:
    """Return the k-means centres of weighted points; there are fewer if there are too few distinct points.

    Args:
        points: shape (n, d).
        sizes: weights ≥ 0, shape (n,); points of weight 0 are ignored.
        num_clusters: number of centres, ≥ 1.
        num_starts: number of k-means++ starts, of which the best is returned, ≥ 1.
        seed: seed of the starts.

    Example:
        >>> points = np.array([[0.0], [9.0], [10.0], [1.0]])
        >>> np.sort(clustered(points, np.array([1.0, 1.0, 3.0, 1.0]), 2), axis=0)
        array([[0.5 ],
               [9.75]])
    """
    from sklearn.cluster import KMeans as Clustering  # a second to import

    points, sizes = points[sizes > 0], sizes[sizes > 0]
    num_clusters = min(num_clusters, len(np.unique(points, axis=0)))
    if not num_clusters:
        return points
    with warnings.catch_warnings():  # about points that are equal but for rounding
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        fit = Clustering(num_clusters, n_init=num_starts, random_state=seed, tol=0.0)
        fit.fit(points, sample_weight=sizes)
    # scikit-learn's own centres have the rounding error of centred points
    shares = sizes * (fit.labels_ == np.arange(num_clusters)[:, None])
    centres: Points = shares @ points / shares.sum(1, keepdims=True)
    return centres


def in_order_of(present: Points, centres: Points) -> Points:
    """Order new centres like the nearest current centres; a current centre without a new one stays.

    Example:
        >>> in_order_of(np.array([[0.0], [5.0], [9.0]]), np.array([[9.5], [0.5]])).ravel()
        array([0.5, 5. , 9.5])
    """
    from scipy.optimize import linear_sum_assignment

    distances = np.square(present[:, None] - centres).sum(2)
    rows, columns = linear_sum_assignment(distances)
    ordered: Points = present.copy()
    ordered[rows] = centres[columns]
    return ordered


@final
class ClusterFedAvg(KeptUpdates):
    """Aggregator of the module `KMeans`: clusters the clients' centroids by weighted k-means.

    The server optimizer must be SGD at rate 1 (the default) for the model to land on the new centres.

    Args:
        num_clusters: k, that of the module.
        weight_by_size: weigh a centroid by its members, from the module's ``cluster_sizes``; else
            weigh all equally.
        num_starts: number of k-means++ starts, of which the best is used, ≥ 1.
        seed: seed of the starts.

    Raises:
        ConfigurationError: for counts below 1; at the start of a round if the model does not have
            ``num_clusters`` centroids.

    Example:
        >>> aggregator = ClusterFedAvg(num_clusters=2)
        >>> present = torch.tensor([0.0, 9.0])
        >>> aggregator.open(present)
        >>> for ends, sizes in (([1.0, 10.0], [2.0, 1.0]), ([8.0, 2.0], [1.0, 2.0])):
        ...     values = present - torch.tensor(ends), torch.tensor(sizes)
        ...     aggregator.add(ClientUpdate(0, *values, num_examples=3, num_steps=1))
        >>> present - aggregator.close()
        tensor([1.5000, 9.0000])
    """

    def __init__(
        self,
        num_clusters: int,
        *,
        weight_by_size: bool = True,
        num_starts: int = 10,
        seed: int = 0,
    ) -> None:
        for name, count in (("num_clusters", num_clusters), ("num_starts", num_starts)):
            check_range(f"ClusterFedAvg: {name}", count, "at least 1")
        if not 0 <= seed < 2**32:
            raise ConfigurationError(
                f"ClusterFedAvg: seed must be from 0 to 2^32 - 1, as scikit-learn takes it, got {seed}"
            )
        self.num_clusters, self.weight_by_size = num_clusters, weight_by_size
        self.num_starts, self.seed = num_starts, seed

    def open(self, like: Tensor) -> None:
        """Start a round from the current centroids ``like``, shape (k d,).

        Raises:
            ConfigurationError: if their size is no multiple of ``num_clusters``.
        """
        if like.numel() % self.num_clusters:
            raise ConfigurationError(
                f"ClusterFedAvg: a model of {like.numel()} parameters cannot hold {self.num_clusters} centroids of "
                "equal size: set num_clusters to that of the KMeans module"
            )
        self._present = like
        self._rows = UpdateRows(like)

    def close(self) -> Tensor:
        """Return the current centroids minus the new ones, shape (k d,)."""
        shape = self.num_clusters, -1
        present = self._present.cpu().double().reshape(shape).numpy()
        updates = list(self._rows.updates())
        ends = [(self._present - update.delta).cpu().double().reshape(shape) for update in updates]
        points = torch.cat(ends).numpy()
        sizes = torch.cat([self._sizes(update) for update in updates]).numpy()
        del self._rows
        options: dict[str, Any] = {"num_starts": self.num_starts, "seed": self.seed}
        centres = clustered(points, sizes, self.num_clusters, **options)
        moved = present - in_order_of(present, centres)
        return torch.from_numpy(moved).flatten().to(self._present)

    def _sizes(self, update: ClientUpdate) -> Tensor:
        """Return the weights of a client's k centroids, shape (k,): the sizes of their clusters, or 1."""
        if self.weight_by_size and update.buffers.numel() == self.num_clusters:
            return update.buffers.cpu().double()
        return torch.ones(self.num_clusters, dtype=torch.float64)
