"""Losses and features: one row for each way in which slots compute them, or cannot.

Batches train whole, so what is computed from weights and a batch is computed alike, whether it is a mean
over examples or examples meet in it. Rows differ in what they ask of the engine: numbers that are drawn,
shapes and branches that depend on values, a backward pass of their own, no loss at all.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strange.rows import (
    FIRST_HAS_ONE,
    FIRST_HAS_ONE_CLASS,
    SLOTS,
    TOKENS,
    UNEVEN,
    WORDS,
    Small,
    X,
    drawn,
    row,
)


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
class ClassWeights(Small):
    """The mean is over the weights of the classes that are there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 5.0, 20.0]))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1], weight=self.weight)
        self.log("loss", loss)
        return loss


@row(shards=FIRST_HAS_ONE)
class SumLoss(Small):
    """No mean: a small batch counts less, and must not be filled up."""

    lr = 0.02

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


def some_ignored():
    targets, lengths = TOKENS.tensors[1].clone(), torch.randint(1, 6, (64,), generator=drawn(5))
    lengths[: UNEVEN[0].stop] = 6
    targets[torch.arange(6)[None] >= lengths[:, None]] = -100
    return TensorDataset(WORDS, targets)


@row(data=some_ignored())
class IgnoreIndex(Small):
    """The first client's sentences are full: no target is ignored."""

    lr = 0.5

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)


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


@row("CTC", data=TOKENS)
class Connectionist(IgnoreIndex):
    """Divides each example's loss by its target's length, then takes the mean."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x).log_softmax(2).transpose(0, 1)
        lengths = (x[:, 0] % 2) + 1
        return F.ctc_loss(scores, y[:, :2] % 11 + 1, torch.full((len(x),), 6), lengths)


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
class TripletsByMining(Small):
    """Pairs found by `nonzero`: how many there are depends on values."""

    def training_step(self, batch, batch_idx):
        z, y = self.net(batch[0]), batch[1]
        left, right = torch.triu(y[:, None] != y[None]).nonzero(as_tuple=True)
        if not len(left):
            return F.cross_entropy(z, y)
        return F.cross_entropy(z, y) + F.relu(1 - (z[left] - z[right]).norm(dim=1)).mean()


class OnFeatures(Small):
    """Cross-entropy of features that ``meet`` changes."""

    def meet(self, z):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.meet(self.net(batch[0])), batch[1])


@row(shards=FIRST_HAS_ONE)
class QuantileNormalised(OnFeatures):
    """Vectorised, PyTorch has a slow way to compute it, of which it warns."""

    def meet(self, z):
        low, middle, high = torch.quantile(z, torch.tensor([0.25, 0.5, 0.75]), dim=0)
        return (z - middle) / (high - low + 0.5)


@row(shards=FIRST_HAS_ONE)
class Fourier(OnFeatures):
    """Complex numbers on the way."""

    def meet(self, z):
        return z + torch.fft.fft(z, dim=0).abs() / len(z)


@row()
class MixUp(Small):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share, other = np.random.beta(0.4, 0.4), torch.randperm(len(x))
        out = self.net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])


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
class FirstBatchIsSpecial(Small):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if batch_idx else 0.1 * loss


class _NormalisedGradients(torch.autograd.Function):
    """The identity; its backward divides by the gradients' spread over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.square().sum(0, keepdim=True).sqrt() + 0.1)


@row(shards=FIRST_HAS_ONE)
class BackwardMixesRows(OnFeatures):
    def meet(self, z):
        return _NormalisedGradients.apply(z)


@row(shards=FIRST_HAS_ONE)
class HookOnActivations(Small):
    """A hook on activations divides their gradient by its norm over the batch."""

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        z.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        return F.cross_entropy(z, batch[1])


@row()
class InnerLoop(Small):
    """Meta-learning: a step on one half of the batch, the loss of the other."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        params = dict(self.net.named_parameters())
        first = F.cross_entropy(torch.func.functional_call(self.net, params, (x[::2],)), y[::2])
        slopes = torch.autograd.grad(first, list(params.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(params.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)
