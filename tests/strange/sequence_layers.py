"""Layers of words and images, and forward passes that are out of the ordinary."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strange.rows import SENTENCES, Small, case, insert, step


class OfSentences(Small):
    """Classifies the mean of a sentence's words, or what ``read`` makes of them."""

    lr = 0.5
    words = staticmethod(lambda: nn.Embedding(12, 8))

    def __init__(self):
        super().__init__()
        self.net, self.out = self.words(), nn.Linear(8, 3)

    def read(self, words):
        return words.mean(1)

    def loss(self, batch):
        return F.cross_entropy(self.out(self.read(self.net(batch[0]))), batch[1])


def table(kind=nn.Embedding, **options):
    """Return fields of a row over sentences with a table of words."""
    return {"data": SENTENCES, "words": staticmethod(lambda: kind(12, 8, **options))}


def sparse_adam(m):
    m.out.requires_grad_(False)
    return torch.optim.SparseAdam(m.net.parameters(), lr=0.1)


case("EmbeddingWithMaxNorm", OfSentences, **table(max_norm=2.0))  # a forward pass writes weights
case("EmbeddingWithSparseGradients", OfSentences, **table(sparse=True))
case("SparseAdam", OfSentences, **table(sparse=True), configure_optimizers=sparse_adam)
# gradients are divided by how often a word is in the batch
case("EmbeddingByFrequency", OfSentences, **table(scale_grad_by_freq=True))
case(
    "LongShortTermMemory",
    OfSentences,
    data=SENTENCES,
    prepare=lambda m: setattr(m, "memory", nn.LSTM(8, 8, batch_first=True)),
    read=lambda m, words: m.memory(words)[0][:, -1],
)


def causal(m):
    """Its mask is a buffer with -inf that is not part of checkpoints."""
    m.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    m.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1), persistent=False)


def attends(m, h):
    return (h + m.attention(h, h, h, attn_mask=m.mask, need_weights=False)[0]).mean(1)


case("CausalAttention", OfSentences, data=SENTENCES, prepare=causal, read=attends)


def convolves(m):
    conv = nn.Conv2d(1, 4, 3, padding=1)
    m.net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), conv, nn.Flatten(), nn.Linear(16, 3))


def shared(m):
    layer = nn.Linear(8, 8)
    m.net = nn.Sequential(nn.Linear(4, 8), layer, nn.Tanh(), layer, nn.Linear(8, 3))


case("Convolution", prepare=convolves)
case("UsedTwice", prepare=shared)


@step(prepare=insert(2, lambda: nn.Dropout(0.2)))
def Checkpointed(self, batch, batch_idx):
    """The forward pass is done again in the backward pass, with its dropout."""
    hidden = checkpoint(self.net[:3], batch[0], use_reentrant=False)
    return F.cross_entropy(self.net[3](hidden), batch[1])


def another(m):
    m.other = nn.Linear(4, 3)


@step(prepare=another)
def ChoosesByValues(self, batch, batch_idx):
    """A Python branch on the batch's mean."""
    layer = self.net if batch[0].mean() > 0 else self.other
    return F.cross_entropy(layer(batch[0]), batch[1])


@step(prepare=another)
def Experts(self, batch, batch_idx):
    """Each example goes to one of two, by values: their numbers differ from batch to batch."""
    x, y = batch
    is_left, out = x[:, 0] > 0, torch.zeros(len(x), 3, dtype=x.dtype)
    out[is_left], out[~is_left] = self.net(x[is_left]), self.other(x[~is_left])
    return F.cross_entropy(out, y)


def empty_and_scalar(m):
    m.nothing, m.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0))


@step(prepare=empty_and_scalar)
def EmptyParameter(self, batch, batch_idx):
    """A parameter without numbers, and one that is a scalar."""
    return F.cross_entropy(self.scale * self.net(batch[0]) + self.nothing.sum(), batch[1])


case(
    "DoubleParameter",  # one parameter is in double precision
    prepare=lambda m: setattr(m, "shift", nn.Parameter(torch.zeros(3, dtype=torch.float64))),
    loss=lambda m, batch: F.cross_entropy(m.net(batch[0]) + m.shift, batch[1]),
)


def constants(m):
    """Buffers of all types that no step changes."""
    m.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406, 0.1]))
    m.register_buffer("large", torch.tensor([16777217.0, 1e30, 1e-30]))
    m.register_buffer("flag", torch.tensor(True))
    m.register_buffer("table", torch.randn(50, 4), persistent=False)


case(
    "ManyConstants",
    prepare=constants,
    loss=lambda m, batch: F.cross_entropy(m.net(batch[0] - m.mean), batch[1]),
)


@step()
def PartOfAWeightIsFixed(self, batch, batch_idx):
    """A constant of the weights: `detach` keeps some gradients out."""
    hidden = self.net[1](self.net[0](batch[0]))
    fixed = F.linear(hidden, self.net[2].weight.detach())
    return F.cross_entropy(fixed + self.net[2].bias, batch[1])
