"""k-means as a LightningModule: its gradient step is Lloyd's step.

    a(x) = argmin_j ‖x - c_j‖²,   m_j = mean {x : a(x) = j},   c_j ← m_j

The step to the means is a gradient step of length 1 on Σ_j ‖c_j - m_j‖² / 2 with fixed m_j, which is the
loss here: with SGD at rate 1 it is Lloyd's step up to rounding, with a smaller rate a damped step, without
changes of the training loop. (Bottou and Bengio 1995, NIPS, *Convergence properties of the k-means
algorithms*, section 3, interpret the same step as Newton's.)

Sources: Lloyd 1982, IEEE Trans. Inf. Theory 28(2); k-means++ starts, Arthur and Vassilvitskii 2007,
SODA, section 2.1. If clients each start with k-means++ on their own examples and the server clusters their
centroids, this is one-shot federated clustering, Dennis et al. 2021, ICML (2103.00697).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import check_seed, run_seed, torch_generator

SCORES = "homogeneity", "completeness", "v_measure", "adjusted_rand"


class KMeans(LightningModule):
    """Lightning module for k-means clustering, for batches of vectors (B, …), or of vectors and labels.

    A local step is Lloyd's step on its batch: set the batch size to at least the largest shard for Lloyd's
    step on the whole shard. A cluster without members does not move. The centroids are a parameter; the
    buffer ``cluster_sizes`` has the number of members in the last step, so that it is part of a client's
    update.

    Args:
        num_clusters: number of clusters k, at least 1.
        num_features: length of a vector, at least 1.
        start: ``clients``: in the first round every client draws initial centroids from its own examples
            (k-means++), which needs the aggregator `ClusterFedAvg`; or ``common``: standard normal draws,
            equal for all clients, for standardised features.
        optimizer: makes the optimizer of the centroids; SGD at rate 1 is Lloyd's step.
        seed: seed of the common start; the run's seed if None.

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
        start: Literal["clients", "common"] = "clients",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=1.0),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_range("KMeans: num_clusters", num_clusters, "at least 1")
        check_range("KMeans: num_features", num_features, "at least 1")
        check_seed("KMeans", seed)
        generator = torch_generator(run_seed(seed), "k-means start")
        self.centroids = nn.Parameter(torch.randn(num_clusters, num_features, generator=generator))
        self.register_buffer("cluster_sizes", torch.zeros(num_clusters))
        self._start = start
        self._optimizer = optimizer
        self.val_scores = nn.ModuleDict({name: ClusteringScore(name) for name in SCORES})
        self.test_scores = nn.ModuleDict({name: ClusteringScore(name) for name in SCORES})

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the nearest centroid's number for each vector of a batch (B, …), shape (B,)."""
        return torch.cdist(vectors.flatten(1), self.centroids).argmin(1)

    def means(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clusters' means (k, d) and sizes (k,); an empty cluster's mean is its centroid."""
        members = nn.functional.one_hot(self(vectors), len(self.centroids)).to(vectors.dtype)
        sizes, sums = members.sum(0), members.T @ vectors.flatten(1)
        means = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), self.centroids)
        return means, sizes

    def check_batch(self, batch: Any) -> None:
        """Raise ConfigurationError if a batch's vectors differ in length from the centroids."""
        vectors, given = _parts(batch)[0], self.centroids.shape[1]
        length = vectors.flatten(1).shape[1]
        if length != given:
            raise ConfigurationError(
                f"model.num_features is {given}, and the vectors have {length} numbers: set num_features to {length}"
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return half the squared distance between centroids and cluster means: SGD at rate 1 is Lloyd's step."""
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
        """Log val/inertia and, if there are labels, how well the clusters agree with them."""
        self._evaluate("val", self.val_scores, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log test/inertia and, if there are labels, how well the clusters agree with them."""
        self._evaluate("test", self.test_scores, batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return for each vector of a batch the number of its cluster, shape (B,)."""
        return self(_parts(batch)[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of the centroids."""
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
        """Return the mean squared distance from a batch's vectors to their nearest centroids."""
        return torch.cdist(vectors.flatten(1), self.centroids.detach()).amin(1).square().mean()


class ClusteringScore(Metric):
    """Metric: agreement of clusters with known classes, by a score of scikit-learn, over all examples.

    Args:
        score: function of `sklearn.metrics` without its ending ``_score``.

    Example:
        >>> metric = ClusteringScore("v_measure")
        >>> metric.update(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]))
        >>> metric.compute()
        tensor(1.)
    """

    full_state_update = False
    clusters: list[Tensor]
    labels: list[Tensor]

    def __init__(self, score: str, **options: Any) -> None:
        super().__init__(**options)
        self._score = score
        self.add_state("clusters", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, clusters: Tensor, labels: Tensor) -> None:
        """Add a batch: cluster numbers and class labels of its examples, both of shape (B,)."""
        self.clusters.append(clusters)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """Return the score over all examples added so far."""
        import sklearn.metrics  # a second to import

        # torchmetrics' adjusted Rand index overflows from 55,000 examples on
        labels, clusters = (dim_zero_cat(part).cpu() for part in (self.labels, self.clusters))
        score = getattr(sklearn.metrics, f"{self._score}_score")
        return torch.tensor(score(labels, clusters), dtype=torch.float32, device=self.device)


def plus_plus(vectors: Tensor, num_clusters: int) -> Tensor:
    """Choose initial centroids (k, d) among vectors (B, d) by k-means++, with the global random generator.

    The first is drawn uniformly, each further one with probability proportional to its squared distance
    from those so far; with fewer distinct vectors than centroids, some are repeated.

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
