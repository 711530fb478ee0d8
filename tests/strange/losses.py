"""Losses: means over examples, and what looks like one."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import (
    FIRST_HAS_ONE,
    FIRST_HAS_ONE_CLASS,
    FULL,
    SLOTS,
    TOKENS,
    UNEVEN,
    WORDS,
    Small,
    X,
    drawn,
    row,
)

WEIGHTS = torch.tensor([1.0, 5.0, 20.0])


@row(engines=SLOTS)
class CrossEntropy(Small):
    """The ordinary one: slots must train it."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@row(engines=SLOTS)
class LabelSmoothing(Small):
    momentum, weight_decay = 0.9, 1e-3

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1)


@row(shards=FIRST_HAS_ONE_CLASS)
@row("ClassWeightsMixed")
class ClassWeights(Small):
    """The mean is over the weights of the classes that are there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", WEIGHTS.clone())

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1], weight=self.weight)
        self.log("loss", loss)
        return loss


@row(shards=FIRST_HAS_ONE_CLASS)
class WeightsByHand(Small):
    """The same weights, and the mean over examples."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (WEIGHTS[batch[1]] * losses).mean()


@row(shards=FIRST_HAS_ONE)
@row("SumLossEven", shards=FULL)
class SumLoss(Small):
    lr = 0.02

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


@row()
class SumOverAConstant(Small):
    """A sum over the batch size that a full batch has."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 8


@row()
class SumOverItsLength(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum") / len(x)


@row(shards=FIRST_HAS_ONE)
class TimesItsLength(Small):
    """The linear scaling rule, within the loss."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y) * (len(x) / 8)


def some_ignored():
    targets, lengths = TOKENS.tensors[1].clone(), torch.randint(1, 6, (64,), generator=drawn(5))
    lengths[: UNEVEN[0].stop] = 6
    targets[torch.arange(6)[None] >= lengths[:, None]] = -100
    return TensorDataset(WORDS, targets)


class OfTokens(Small):
    lr = 0.5

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))


@row(data=some_ignored())
class IgnoreIndex(OfTokens):
    """The first client's sentences are full: no target is ignored."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)


@row(data=some_ignored())
class MaskedTokens(OfTokens):
    """The same by hand."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        mask = y >= 0
        losses = F.cross_entropy(self.net(x).transpose(1, 2), y.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum()


@row(data=TOKENS)
class TokensInRows(OfTokens):
    """Every example has as many tokens: their mean is one over examples."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())


def some_missing():
    labels = torch.randint(0, 2, (64, 3), generator=drawn(6)).float()
    missing = torch.rand(64, 3, generator=drawn(7)) < 0.6
    missing[: UNEVEN[0].stop] = False
    return TensorDataset(X, labels.masked_fill(missing, torch.nan))


@row(data=some_missing())
class MissingLabels(Small):
    """Many labels, the mean over those that are there; the first client has all."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        known = ~y.isnan()
        losses = F.binary_cross_entropy_with_logits(self.net(x), y.nan_to_num(), reduction="none")
        return (losses * known).sum() / known.sum().clamp(min=1)


@row(data=TensorDataset(X, (X[:, 0] > 0).long()), local_epochs=8)
class Flooding(Small):
    """From some round on the loss is below the flood's level."""

    lr = 0.5

    def training_step(self, batch, batch_idx):
        return (F.cross_entropy(self.net(batch[0]), batch[1]) - 0.2).abs() + 0.2


@row(local_epochs=6)
class FreeBits(Small):
    """The mean over the batch is clamped, which it is in some batches only."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)
        self.net = nn.Identity()
        nn.init.normal_(self.encoder.weight, std=0.01)
        nn.init.zeros_(self.encoder.bias)

    def training_step(self, batch, batch_idx):
        mean, log_variance = self.encoder(batch[0]).chunk(2, 1)
        bits = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        loss = F.mse_loss(self.decoder(mean), batch[0])
        return loss + 0.1 * bits.mean(0).clamp(min=0.05).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@row()
class Focal(Small):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return ((1 - (-losses).exp()).square() * losses).mean()


@row()
class Pinball(Small):
    """Three quantiles of one number."""

    def training_step(self, batch, batch_idx):
        x, levels = batch[0], torch.tensor([0.1, 0.5, 0.9])
        gap = x[:, :1] - self.net(x)
        return torch.maximum(levels * gap, (levels - 1) * gap).mean()


@row(shards=FIRST_HAS_ONE)
class SoftIoU(Small):
    """Intersection over union of the whole batch."""

    def training_step(self, batch, batch_idx):
        p, y = self.net(batch[0]).softmax(1), F.one_hot(batch[1], 3)
        return 1 - (p * y).sum() / (p + y - p * y).sum()


@row("DiceOfTheBatch", shards=FIRST_HAS_ONE)
class Dice(Small):
    dims = (0, 1)

    def training_step(self, batch, batch_idx):
        p, y = self.net(batch[0]).softmax(1), F.one_hot(batch[1], 3)
        overlap = 2 * (p * y).sum(self.dims) + 1
        return (1 - overlap / ((p + y).sum(self.dims) + 1)).mean()


@row()
class DiceOfExamples(Dice):
    dims = (1,)


@row(shards=FIRST_HAS_ONE)
class DiceOfClasses(Dice):
    dims = (0,)


@row("CTC", data=TOKENS)
class Connectionist(OfTokens):
    """Divides each example's loss by its target's length, then takes the mean."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x).log_softmax(2).transpose(0, 1)
        lengths = (x[:, 0] % 2) + 1
        return F.ctc_loss(scores, y[:, :2] % 11 + 1, torch.full((len(x),), 6), lengths)


@row()
class Distilled(Small):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 3).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        target = (self.teacher(batch[0]) / 2).softmax(1)
        return F.kl_div((self.net(batch[0]) / 2).log_softmax(1), target, reduction="batchmean")

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.5)
