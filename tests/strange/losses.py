"""Losses and features: one row for each way in which slots compute them, or cannot.

Batches train whole, so what is computed from weights and a batch is computed alike, whether it is a mean
over examples or examples meet in it. Rows differ in what they ask of the engine: numbers that are drawn,
shapes and branches that depend on values, a backward pass of their own, no loss at all.
"""

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
    case,
    drawn,
    step,
)


def some_ignored():
    targets, lengths = TOKENS.tensors[1].clone(), torch.randint(1, 6, (64,), generator=drawn(5))
    lengths[: UNEVEN[0].stop] = 6
    targets[torch.arange(6)[None] >= lengths[:, None]] = -100
    return TensorDataset(WORDS, targets)


class OfWords(Small):
    lr = 0.5

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))


class OnFeatures(Small):
    """Cross-entropy of features that ``meet`` changes."""

    def loss(self, batch):
        return F.cross_entropy(self.meet(self.net(batch[0])), batch[1])


class _NormalisedGradients(torch.autograd.Function):
    """The identity; its backward divides by the gradients' spread over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.square().sum(0, keepdim=True).sqrt() + 0.1)


case("CrossEntropy", engines=SLOTS)  # the ordinary one: slots must train it
case(
    "LabelSmoothing",
    engines=SLOTS,
    momentum=0.9,
    weight_decay=1e-3,
    loss=lambda m, batch: F.cross_entropy(m.net(batch[0]), batch[1], label_smoothing=0.1),
)
case(  # no mean: a small batch counts less, and must not be filled up
    "SumLoss",
    shards=FIRST_HAS_ONE,
    lr=0.02,
    loss=lambda m, batch: F.cross_entropy(m.net(batch[0]), batch[1], reduction="sum"),
)
case(  # complex numbers on the way
    "Fourier",
    OnFeatures,
    shards=FIRST_HAS_ONE,
    meet=lambda m, z: z + torch.fft.fft(z, dim=0).abs() / len(z),
)
case(
    "BackwardMixesRows",
    OnFeatures,
    shards=FIRST_HAS_ONE,
    meet=lambda m, z: _NormalisedGradients.apply(z),
)


@step(
    shards=FIRST_HAS_ONE_CLASS,
    prepare=lambda m: m.register_buffer("weight", torch.tensor([1.0, 5.0, 20.0])),
)
def ClassWeights(self, batch, batch_idx):
    """The mean is over the weights of the classes that are there."""
    loss = F.cross_entropy(self.net(batch[0]), batch[1], weight=self.weight)
    self.log("loss", loss)
    return loss


@step(OfWords, data=some_ignored())
def IgnoreIndex(self, batch, batch_idx):
    """The first client's sentences are full: no target is ignored."""
    x, y = batch
    return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)


@step(OfWords, data=TOKENS)
def CTC(self, batch, batch_idx):
    """Divides each example's loss by its target's length, then takes the mean."""
    x, y = batch
    scores, lengths = self.net(x).log_softmax(2).transpose(0, 1), (x[:, 0] % 2) + 1
    return F.ctc_loss(scores, y[:, :2] % 11 + 1, torch.full((len(x),), 6), lengths)


@step()
def LossInADict(self, batch, batch_idx):
    logits = self.net(batch[0])
    return {"logits": logits, "loss": F.cross_entropy(logits, batch[1])}


@step()
def SkipsBatches(self, batch, batch_idx):
    """No loss for a batch without examples of class 0."""
    if not (batch[1] == 0).any() or batch_idx % 3 == 1:
        return None
    return self.loss(batch)


@step()
def FirstBatchIsSpecial(self, batch, batch_idx):
    return self.loss(batch) if batch_idx else 0.1 * self.loss(batch)


@step(shards=FIRST_HAS_ONE)
def SupervisedContrastive(self, batch, batch_idx):
    """With one example there is no pair."""
    x, y = batch
    z = F.normalize(self.net(x), dim=1)
    scores = z @ z.T / 0.5
    same = (y[:, None] == y[None]) & ~torch.eye(len(x), dtype=torch.bool)
    logs = scores - scores.logsumexp(1, keepdim=True)
    return self.loss(batch) - 0.5 * (logs * same).sum() / len(x)


@step(shards=FIRST_HAS_ONE)
def Contrastive(self, batch, batch_idx):
    """Two noisy views; an example's other view among all of the batch (SimCLR)."""
    one, two = (self.net(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
    scores = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / 0.5
    return F.cross_entropy(scores, torch.arange(len(scores)))


@step(shards=FIRST_HAS_ONE)
def QuantileNormalised(self, batch, batch_idx):
    """Vectorised, PyTorch has a slow way to compute it, of which it warns."""
    z = self.net(batch[0])
    low, middle, high = torch.quantile(z, torch.tensor([0.25, 0.5, 0.75]), dim=0)
    return F.cross_entropy((z - middle) / (high - low + 0.5), batch[1])


@step(shards=FIRST_HAS_ONE)
def HookOnActivations(self, batch, batch_idx):
    """A hook on activations divides their gradient by its norm over the batch."""
    z = self.net(batch[0])
    z.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
    return F.cross_entropy(z, batch[1])


@step()
def InnerLoop(self, batch, batch_idx):
    """Meta-learning: a step on one half of the batch, the loss of the other."""
    x, y = batch
    params = dict(self.net.named_parameters())
    first = F.cross_entropy(torch.func.functional_call(self.net, params, (x[::2],)), y[::2])
    slopes = torch.autograd.grad(first, list(params.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(params.items(), slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)
