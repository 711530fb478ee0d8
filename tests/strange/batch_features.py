"""Features in which the examples of a batch meet."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from strange.rows import FIRST_HAS_ONE, SENTENCES, Small, row


class OnFeatures(Small):
    """Cross-entropy of features that `meet` changes."""

    def meet(self, z):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.meet(self.net(batch[0])), batch[1])


@row(shards=FIRST_HAS_ONE)
class Centred(OnFeatures):
    def meet(self, z):
        return z - z.mean(0)


@row(shards=FIRST_HAS_ONE)
class CentredByAConstant(OnFeatures):
    """No gradient goes through the mean."""

    def meet(self, z):
        return z - z.mean(0).detach()


@row(shards=FIRST_HAS_ONE)
class Standardised(OnFeatures):
    def meet(self, z):
        return (z - z.mean(0)) / (z.var(0, unbiased=False) + 0.1).sqrt()


@row()
class Rolled(OnFeatures):
    def meet(self, z):
        return z + 0.3 * z.roll(1, 0)


@row()
class Flipped(OnFeatures):
    def meet(self, z):
        return z + 0.3 * z.flip(0)


@row()
class RunningSum(OnFeatures):
    def meet(self, z):
        return z + 0.1 * z.cumsum(0)


@row()
class SortedFeatures(OnFeatures):
    def meet(self, z):
        return z + z.sort(0).values


@row()
class MinusTheFirst(OnFeatures):
    def meet(self, z):
        return z - 0.5 * z[0]


@row(shards=FIRST_HAS_ONE)
class SoftmaxOverTheBatch(OnFeatures):
    """The wrong dimension, as it happens."""

    def meet(self, z):
        return z + z.softmax(0)


@row(shards=FIRST_HAS_ONE)
class QuantileNormalised(OnFeatures):
    def meet(self, z):
        low, middle, high = torch.quantile(z, torch.tensor([0.25, 0.5, 0.75]), dim=0)
        return (z - middle) / (high - low + 0.5)


@row(shards=FIRST_HAS_ONE)
class RanksAsFeatures(OnFeatures):
    def meet(self, z):
        return z + z.argsort(0).argsort(0) / len(z)


@row(shards=FIRST_HAS_ONE)
class NormOfTheBatch(OnFeatures):
    def meet(self, z):
        return z / (z.norm() + 1)


@row(shards=FIRST_HAS_ONE)
class Extremes(OnFeatures):
    def meet(self, z):
        return (z - z.amin(0)) / (z.amax(0) - z.amin(0) + 1)


@row(shards=FIRST_HAS_ONE)
class Fourier(OnFeatures):
    def meet(self, z):
        return z + torch.fft.fft(z, dim=0).abs() / len(z)


@row()
class EveryOther(Small):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0][::2]), batch[1][::2])


@row()
class FirstHalf(Small):
    """Half of the batch has labels."""

    def training_step(self, batch, batch_idx):
        half = -(-len(batch[0]) // 2)
        with_labels = F.cross_entropy(self.net(batch[0][:half]), batch[1][:half])
        return with_labels + self.net(batch[0]).square().mean()


@row()
class OneRowMore(Small):
    """A row of zeros is appended to the batch."""

    def training_step(self, batch, batch_idx):
        x = F.pad(batch[0], (0, 0, 0, 1))
        return F.cross_entropy(self.net(x), F.pad(batch[1], (0, 1)))


@row()
class BatchAsChannels(Small):
    """The batch is the channel dimension of a convolution that mixes nothing, and one that does."""

    def training_step(self, batch, batch_idx):
        x = batch[0].T[None]
        smoothed = F.avg_pool1d(F.pad(x, (1, 1)), 3, stride=1)[0].T
        return F.cross_entropy(self.net(batch[0] + smoothed), batch[1])


@row(data=SENTENCES)
class AttentionOverTheBatch(Small):
    """``batch_first`` was forgotten: examples attend to each other."""

    batch_first = False

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.net = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=self.batch_first)
        self.out = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.net(self.words(batch[0])).mean(1)), batch[1])


@row(data=SENTENCES)
class AttentionOverTime(AttentionOverTheBatch):
    batch_first = True


@row()
class MixUp(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share, other = np.random.beta(0.4, 0.4), torch.randperm(len(x))
        out = self.net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])


@row()
class MixUpByFlipping(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share = torch.rand(len(x), 1)
        out = self.net(share * x + (1 - share) * x.flip(0))
        losses = [F.cross_entropy(out, target, reduction="none") for target in (y, y.flip(0))]
        return (share[:, 0] * losses[0] + (1 - share[:, 0]) * losses[1]).mean()


@row()
class RDrop(Small):
    """Two passes with dropout agree with each other."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        one, two = (self.net(batch[0]).log_softmax(1) for _ in range(2))
        apart = F.kl_div(one, two, reduction="batchmean", log_target=True)
        return F.nll_loss(one, batch[1]) + F.nll_loss(two, batch[1]) + apart


@row()
class SmallRateBelow(Small):
    """A term over the batch acts on layers whose rate is small: an error there hides."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0]))
        centred = hidden - hidden.mean(0)
        alike = (centred.T @ centred).fill_diagonal_(0)
        return F.cross_entropy(self.net[2](hidden), batch[1]) + 0.1 * alike.square().mean()

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters(), "lr": 1e-3},
            {"params": self.net[2].parameters(), "lr": 0.5},
        ]
        return torch.optim.SGD(groups)


@row()
class FirstBatchIsSpecial(Small):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if batch_idx else 0.1 * loss


@row()
class LateBatchTerm(Small):
    """From the second round on the examples of a batch meet."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        loss = F.cross_entropy(z, batch[1])
        if self.current_epoch >= 1:
            loss = loss - 0.05 * (z - z.mean(0)).square().mean()
        return loss
