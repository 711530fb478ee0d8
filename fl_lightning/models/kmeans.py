"""k-means, whose local step is Lloyd's, not one down the gradient of a loss.

    a(x) = argmin_j ‖x - c_j‖²,   m_j = mean {x : a(x) = j},   c_j ← m_j

The step to the means is a step of length 1 down the gradient of Σ_j ‖c_j - m_j‖² / 2 with m_j held
fixed, which is how it is written here: with SGD at rate 1 Lloyd's step but for rounding, with a
smaller one a damped step; no part of the training loop knows of it. (Bottou and Bengio 1995, NIPS,
*Convergence properties of the k-means algorithms*, section 3, read the same step as Newton's.)

Sources: Lloyd 1982, IEEE Trans. Inf. Theory 28(2); k-means++ starts, Arthur and Vassilvitskii 2007,
SODA, section 2.1. Clients that each start with k-means++ on their own examples, merged by clustering
their centroids, are one-shot federated clustering as in Dennis et al. 2021, ICML (2103.00697).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import check_seed, run_seed, torch_generator
from fl_lightning.models.clustering_scores import SCORES, ClusteringScore


class KMeans(LightningModule):
    """Cluster vectors: a batch is vectors (B, …), or a tuple that begins with them and with labels.

    A local step is Lloyd's on its batch: give the data a batch size of at least the largest shard,
    so that it is Lloyd's on the whole shard. A cluster without members stays where it is. The
    centroids are an ordinary parameter; ``cluster_sizes``, a buffer, holds the members of each in
    the last step, so that they travel with a client's update.

    Args:
        num_clusters: k ≥ 1.
        num_features: numbers of a vector, ≥ 1.
        num_labels: classes of the labels that evaluation compares clusters with; k if None.
        start: ``clients``, in the first round every client draws its own start from its own
            examples (k-means++), which needs `ClusterFedAvg` as the aggregator; or ``common``,
            standard normal draws that all share, for standardised features.
        optimizer: what moves the centroids to the means; SGD at rate 1 is Lloyd's step.
        seed: of the common start; the run's seed if None.

    Raises:
        ConfigurationError: for counts below 1.

    Example:
        >>> model = KMeans(num_clusters=2, num_features=1, start="common", seed=0)
        >>> _ = model.centroids.data.copy_(torch.tensor([[0.0], [9.0]]))
        >>> model(torch.tensor([[1.0], [3.0], [8.0]]))
        tensor([0, 0, 1])
        >>> with torch.no_grad():
        ...     model.means(torch.tensor([[1.0], [3.0], [8.0]]))
        (tensor([[2.],
                [8.]]), tensor([2., 1.]))
    """

    cluster_sizes: Tensor

    def __init__(
        self,
        num_clusters: int,
        num_features: int,
        *,
        num_labels: int | None = None,
        start: Literal["clients", "common"] = "clients",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=1.0),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        counts = {
            "num_clusters": num_clusters,
            "num_features": num_features,
            "num_labels": num_labels,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigurationError(f"KMeans: {name} must be at least 1, got {count}")
        check_seed("KMeans", seed)
        if start not in ("clients", "common"):
            raise ConfigurationError(f"KMeans: start must be clients or common, got {start!r}")
        generator = torch_generator(run_seed(seed), "k-means start")
        self.centroids = nn.Parameter(torch.randn(num_clusters, num_features, generator=generator))
        self.register_buffer("cluster_sizes", torch.zeros(num_clusters))
        self._start = start
        self._optimizer = optimizer
        shape = num_labels or num_clusters, num_clusters
        self.val_scores = nn.ModuleDict({name: ClusteringScore(name, *shape) for name in SCORES})
        self.test_scores = nn.ModuleDict({name: ClusteringScore(name, *shape) for name in SCORES})

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the nearest centroid's number for each of the vectors (B, …), shape (B,)."""
        return torch.cdist(vectors.flatten(1), self.centroids).argmin(1)

    def means(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clusters' means (k, d), the centroid itself where it is empty, and sizes (k,)."""
        members = nn.functional.one_hot(self(vectors), len(self.centroids)).to(vectors.dtype)
        sizes, sums = members.sum(0), members.T @ vectors.flatten(1)
        means = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), self.centroids)
        return means, sizes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return half the squared way to the means, of which the gradient is Lloyd's step."""
        vectors, _ = _parts(batch)
        if (
            self.training
            and batch_idx == 0
            and self.current_epoch == 0
            and self._start == "clients"
        ):
            self.centroids.data.copy_(plus_plus(vectors.flatten(1), len(self.centroids)))
        with torch.no_grad():
            means, sizes = self.means(vectors)
            self.cluster_sizes.copy_(sizes)
        self.log("train/inertia", self._inertia(vectors), batch_size=len(vectors))
        return (self.centroids - means).square().sum() / 2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log val/inertia and, where there are labels, how the clusters agree with them."""
        self._evaluate("val", self.val_scores, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the same for the test set."""
        self._evaluate("test", self.test_scores, batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return cluster numbers (B,)."""
        return self(_parts(batch)[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        """Return what moves the centroids."""
        return self._optimizer([self.centroids])

    def _evaluate(self, stage: str, scores: nn.ModuleDict, batch: Any) -> None:
        vectors, labels = _parts(batch)
        inertia = self._inertia(vectors)
        self.log(f"{stage}/inertia", inertia, batch_size=len(vectors), sync_dist=True)
        if labels is not None:
            clusters = self(vectors)
            for name, score in scores.items():
                assert isinstance(score, ClusteringScore)
                score.update(clusters, labels)
                self.log(f"{stage}/{name}", score, batch_size=len(vectors))

    def _inertia(self, vectors: Tensor) -> Tensor:
        """Return the mean squared distance to the nearest centroid."""
        return torch.cdist(vectors.flatten(1), self.centroids.detach()).amin(1).square().mean()


def plus_plus(vectors: Tensor, num_clusters: int) -> Tensor:
    """Return k-means++'s first centroids (k, d), drawn by the global generator from vectors (B, d).

    The first is any of them, each further one is drawn with probability proportional to its squared
    distance from those so far; with fewer different vectors than centroids, some are repeated.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> plus_plus(torch.tensor([[0.0], [0.0], [5.0]]), 2).sort(dim=0).values
        tensor([[0.],
                [5.]])
    """
    chosen = [vectors[int(torch.randint(len(vectors), ()))]]
    for _ in range(num_clusters - 1):
        distances = torch.cdist(vectors, torch.stack(chosen)).amin(1).square()
        if not bool(distances.any()):
            distances = torch.ones_like(distances)
        chosen.append(vectors[int(torch.multinomial(distances, 1))])
    return torch.stack(chosen)


def _parts(batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    return batch[0], batch[1] if len(batch) > 1 else None
