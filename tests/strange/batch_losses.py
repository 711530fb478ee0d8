"""Losses of a whole batch that are no mean over its examples."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import (
    FIRST_HAS_ONE,
    Small,
    X,
    Y,
    row,
)


@row(shards=FIRST_HAS_ONE)
class RootMeanSquare(Small):
    def training_step(self, batch, batch_idx):
        return (F.mse_loss(self.net(batch[0]), batch[0][:, :3]) + 1e-3).sqrt()


@row(shards=FIRST_HAS_ONE)
class Tilted(Small):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (2 * losses).exp().mean().log() / 2


@row(shards=FIRST_HAS_ONE)
class HardestExample(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").max()


@row(shards=FIRST_HAS_ONE)
class HardExamples(Small):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.topk(-(-len(losses) // 2)).values.mean()


@row()
class ConfidentExamples(Small):
    """How many examples count depends on their values."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        kept = losses[losses < 1.2]
        return kept.mean() if len(kept) else losses.mean()


@row(shards=FIRST_HAS_ONE)
class Correlation(Small):
    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])[:, 0]
        found, wanted = found - found.mean(), batch[0][:, 0] - batch[0][:, 0].mean()
        return 1 - (found * wanted).sum() / (found.norm() * wanted.norm() + 1e-2)


@row()
class BalancedByTheBatch(Small):
    """The positives' weight is the batch's own."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])[:, 0]
        is_first = (batch[1] == 0).to(out.dtype)
        weight = (1 - is_first).sum() / is_first.sum().clamp(min=1)
        return F.binary_cross_entropy_with_logits(out, is_first, pos_weight=weight)


@row(data=TensorDataset(X, Y, torch.where(torch.arange(64) < 19, 1.0, X[:, 1].abs() + 0.1)))
class ExampleWeights(Small):
    """The first client's weights are all 1."""

    def training_step(self, batch, batch_idx):
        x, y, weight = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (weight * losses).sum() / weight.sum()


@row()
class LossInADict(Small):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {"logits": logits, "loss": F.cross_entropy(logits, batch[1])}


@row()
class SkipsBatches(Small):
    """No loss for a batch without examples of class 0."""

    def training_step(self, batch, batch_idx):
        if not (batch[1] == 0).any() or batch_idx % 3 == 1:
            return None
        return F.cross_entropy(self.net(batch[0]), batch[1])


@row()
class LearntLossWeights(Small):
    """Kendall et al. 2018: every task's uncertainty is a parameter, here a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        one, two = F.cross_entropy(out, batch[1]), F.mse_loss(out, batch[0][:, :3])
        return one * (-self.first).exp() + self.first + two * (-self.second).exp() + self.second


@row()
class GaussianLikelihood(Small):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return F.gaussian_nll_loss(out[:, 0], batch[0][:, 0], F.softplus(out[:, 1]) + 0.1)


@row(data=TensorDataset(X, (X[:, 0].exp()).int()))
class Counts(Small):
    def training_step(self, batch, batch_idx):
        return F.poisson_nll_loss(self.net(batch[0])[:, 0], batch[1])


@row(shards=FIRST_HAS_ONE)
class Pairs(Small):
    """Every pair of the batch should be in order."""

    def training_step(self, batch, batch_idx):
        score, wanted = self.net(batch[0])[:, 0], batch[0][:, 0]
        sign = (wanted[:, None] - wanted[None]).sign()
        return F.relu(1 - sign * (score[:, None] - score[None])).mean()


@row(shards=FIRST_HAS_ONE)
class Survival(Small):
    """Cox's partial likelihood: sorted by time, summed over those at risk."""

    def training_step(self, batch, batch_idx):
        score = self.net(batch[0])[:, 0][batch[0][:, 0].argsort(descending=True)]
        return (score.logcumsumexp(0) - score).mean()


@row()
class Decayed(Small):
    """A penalty that no example is part of."""

    def training_step(self, batch, batch_idx):
        penalty = sum(p.abs().sum() for p in self.parameters())
        return F.cross_entropy(self.net(batch[0]), batch[1]) + 1e-2 * penalty


@row(shards=FIRST_HAS_ONE)
class DiverseBatch(Small):
    """The mean prediction of a batch should be even."""

    def training_step(self, batch, batch_idx):
        mean = self.net(batch[0]).softmax(1).mean(0)
        return F.cross_entropy(self.net(batch[0]), batch[1]) + (mean * mean.log()).sum()


@row()
class ProductOfMeans(Small):
    """Each factor is a mean over the batch, their product is not."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) * (1 + out.square().mean())
