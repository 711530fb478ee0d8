"""Layers of words and images, and forward passes that are out of the ordinary."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strange.rows import SENTENCES, Classifies, Small, row


class OfSentences(Small):
    lr = 0.5

    def __init__(self):
        super().__init__()
        self.net = self.words()
        self.out = nn.Linear(8, 3)

    def words(self):
        return nn.Embedding(12, 8)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.net(batch[0]).mean(1)), batch[1])


@row(data=SENTENCES)
class EmbeddingWithMaxNorm(OfSentences):
    """A forward pass writes to the weights."""

    def words(self):
        return nn.Embedding(12, 8, max_norm=2.0)


@row(data=SENTENCES)
class EmbeddingWithSparseGradients(OfSentences):
    def words(self):
        return nn.Embedding(12, 8, sparse=True)


@row(data=SENTENCES)
class SparseAdam(EmbeddingWithSparseGradients):
    def __init__(self):
        super().__init__()
        self.out.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.net.parameters(), lr=0.1)


@row(data=SENTENCES)
class EmbeddingWithPadding(OfSentences):
    def words(self):
        return nn.Embedding(12, 8, padding_idx=3)


@row(data=SENTENCES)
class EmbeddingByFrequency(OfSentences):
    """Gradients are divided by how often a word is in the batch."""

    def words(self):
        return nn.Embedding(12, 8, scale_grad_by_freq=True)


@row(data=SENTENCES)
class Bag(OfSentences):
    def words(self):
        return nn.EmbeddingBag(12, 8)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.net(batch[0])), batch[1])


@row(data=SENTENCES)
class LongShortTermMemory(OfSentences):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(8, 8, batch_first=True)

    def training_step(self, batch, batch_idx):
        states, _ = self.memory(self.net(batch[0]))
        return F.cross_entropy(self.out(states[:, -1]), batch[1])


@row(data=SENTENCES)
class GatedUnits(OfSentences):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def training_step(self, batch, batch_idx):
        words = self.net(batch[0])
        state = torch.zeros(len(words), 8, dtype=words.dtype)
        for step in words.unbind(1):
            state = self.cell(step, state)
        return F.cross_entropy(self.out(state), batch[1])


@row(data=SENTENCES)
class CausalAttention(OfSentences):
    """Its mask is a buffer with -inf that is not part of checkpoints."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        mask = torch.full((6, 6), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def training_step(self, batch, batch_idx):
        h = self.net(batch[0])
        h = h + self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        return F.cross_entropy(self.out(h.mean(1)), batch[1])


@row()
class Convolution(Small):
    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(1, 4, 3, padding=1)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), conv, nn.Flatten(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@row()
class Checkpointed(Small):
    """The forward pass is done again in the backward pass, with its dropout."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.2))

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.net[:3], batch[0], use_reentrant=False)
        return F.cross_entropy(self.net[3](hidden), batch[1])


@row()
class UsedTwice(Classifies):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.net = nn.Sequential(nn.Linear(4, 8), shared, nn.Tanh(), shared, nn.Linear(8, 3))


@row()
class ChoosesByValues(Small):
    """A Python branch on the batch's mean."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        layer = self.net if batch[0].mean() > 0 else self.other
        return F.cross_entropy(layer(batch[0]), batch[1])


@row()
class Experts(Small):
    """Each example goes to one of two, by values: their numbers differ from batch to batch."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        is_left, out = x[:, 0] > 0, torch.zeros(len(x), 3, dtype=x.dtype)
        out[is_left], out[~is_left] = self.net(x[is_left]), self.other(x[~is_left])
        return F.cross_entropy(out, y)


@row()
class EmptyParameter(Classifies):
    """A parameter without numbers, and one that is a scalar."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.scale * self.net(batch[0]) + self.nothing.sum(), batch[1])


@row()
class DoubleParameter(Classifies):
    """One parameter is in double precision."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) + self.shift, batch[1])


@row()
class ManyConstants(Classifies):
    """Buffers of all types that no step changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406, 0.1]))
        self.register_buffer("large", torch.tensor([16777217.0, 1e30, 1e-30]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("table", torch.randn(50, 4), persistent=False)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0] - self.mean), batch[1])


@row()
class PartOfAWeightIsFixed(Small):
    """A constant of the weights: `detach` keeps some gradients out."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0]))
        fixed = F.linear(hidden, self.net[2].weight.detach())
        return F.cross_entropy(fixed + self.net[2].bias, batch[1])
