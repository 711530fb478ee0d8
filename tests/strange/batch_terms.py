"""Steps in which the examples of a batch meet."""

import torch
from torch.nn import functional as F

from strange.rows import FIRST_HAS_ONE, Small, row


@row(shards=FIRST_HAS_ONE)
class SupervisedContrastive(Small):
    """With one example there is no pair."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = F.normalize(self.net(x), dim=1)
        scores = z @ z.T / 0.5
        same = (y[:, None] == y[None]) & ~torch.eye(len(x), dtype=torch.bool)
        logs = scores - scores.logsumexp(1, keepdim=True)
        return F.cross_entropy(self.net(x), y) - 0.5 * (logs * same).sum() / len(x)


@row(shards=FIRST_HAS_ONE)
class Contrastive(Small):
    """Two noisy views; an example's other view among all of the batch (SimCLR)."""

    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
        scores = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / 0.5
        return F.cross_entropy(scores, torch.arange(len(scores)))


@row()
class HardTriplets(Small):
    """The furthest of the same class, the nearest of another."""

    def training_step(self, batch, batch_idx):
        z, y = self.net(batch[0]), batch[1]
        apart = (z[:, None] - z[None]).square().sum(2)
        same = y[:, None] == y[None]
        furthest = apart.masked_fill(~same, 0).amax(1)
        nearest = apart.masked_fill(same, 1e3).amin(1)
        return F.relu(furthest - nearest + 1).mean()


@row()
class TripletsByMining(Small):
    """Pairs found by `nonzero`: how many there are depends on values."""

    def training_step(self, batch, batch_idx):
        z, y = self.net(batch[0]), batch[1]
        left, right = torch.triu(y[:, None] != y[None]).nonzero(as_tuple=True)
        if not len(left):
            return F.cross_entropy(z, y)
        return F.cross_entropy(z, y) + F.relu(1 - (z[left] - z[right]).norm(dim=1)).mean()


@row(shards=FIRST_HAS_ONE)
class VarianceAndCovariance(Small):
    """VICReg's terms."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        centred = z - z.mean(0)
        covariance = centred.T @ centred / len(z)
        spread = (z.var(0, unbiased=False) + 1e-2).sqrt()
        return F.relu(1 - spread).mean() + covariance.fill_diagonal_(0).square().sum()


# a correlation over few examples: rounding is larger
@row(shards=FIRST_HAS_ONE, tolerance=3e-5)
class BarlowTwins(Small):
    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
        one, two = (z / (z.square().mean(0) + 1e-2).sqrt() for z in (one, two))
        return (one.T @ two / len(one) - torch.eye(3)).square().sum()
