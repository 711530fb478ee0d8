"""Layers whose parameters, buffers or backward are out of the ordinary."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from strange.rows import FIRST_HAS_ONE, FULL, SENTENCES, TOKENS, Small, row


class Classifies(Small):
    """Cross-entropy of whatever `net` is."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class WithNorm(Classifies):
    """Has one more layer after the first."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, self.norm())

    def norm(self):
        raise NotImplementedError


@row(data=TOKENS)
class TiedWeights(Small):
    momentum = 0.9

    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.net.weight

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.net(batch[0])).flatten(0, 1), batch[1].flatten())


@row()
class WeightNorm(Classifies):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.net[0])


@row()
class OldWeightNorm(Classifies):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.net[0])


@row()
class SpectralNorm(Classifies):
    """Its buffers take a step of the power method at every use."""

    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.net[0])


@row()
class OldSpectralNorm(Classifies):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.spectral_norm(self.net[0])


@row()
class Orthogonal(Classifies):
    def __init__(self):
        super().__init__()
        parametrizations.orthogonal(self.net[2])


class _LowRank(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.down = nn.Parameter(0.1 * torch.randn(2, columns))
        self.up = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight):
        return weight + self.up @ self.down


@row()
class LowRankByParametrization(Classifies):
    """LoRA by hand: the weights are frozen, their change has rank 2."""

    def __init__(self):
        super().__init__()
        for layer in (self.net[0], self.net[2]):
            layer.requires_grad_(False)
            parametrize.register_parametrization(layer, "weight", _LowRank(*layer.weight.shape))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


@row()
class LowRankByPeft(Classifies):
    def __init__(self):
        peft = pytest.importorskip("peft")
        super().__init__()
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["0", "2"])
        self.net = peft.get_peft_model(self.net, config)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


@row(is_slow=True)
class CompiledSubmodule(Classifies):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net)


@row(shards=FULL)
@row("BatchNormRagged")
class BatchNorm(WithNorm):
    def norm(self):
        return nn.BatchNorm1d(8)


@row(shards=FULL)
class BatchNormCumulative(WithNorm):
    """Its rate is one over the number of batches that it saw."""

    def norm(self):
        return nn.BatchNorm1d(8, momentum=None)


@row(shards=FULL)
class BatchNormWithoutStatistics(WithNorm):
    def norm(self):
        return nn.BatchNorm1d(8, track_running_stats=False)


@row()
class FrozenBatchNorm(WithNorm):
    def norm(self):
        return nn.BatchNorm1d(8).requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[1].eval()


@row(shards=FIRST_HAS_ONE, refused="more than 1 value per channel")
class BatchNormOfOne(WithNorm):
    def norm(self):
        return nn.BatchNorm1d(8)


@row()
class GroupNorm(WithNorm):
    def norm(self):
        return nn.GroupNorm(2, 8)


@row()
class LayerNorm(WithNorm):
    def norm(self):
        return nn.LayerNorm(8)


class _OverChannels(nn.Module):
    """Reads eight numbers as two channels of four."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, 4))).flatten(1)


@row()
class InstanceNorm(WithNorm):
    def norm(self):
        return _OverChannels(nn.InstanceNorm1d(2, affine=True))


@row()
class InstanceNormWithStatistics(WithNorm):
    def norm(self):
        return _OverChannels(nn.InstanceNorm1d(2, track_running_stats=True))


@row()
class LocalResponseNorm(WithNorm):
    def norm(self):
        return _OverChannels(nn.LocalResponseNorm(2))


@row()
class Dropped(WithNorm):
    def norm(self):
        return nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.1), nn.RReLU())


@row()
class Gumbel(WithNorm):
    class Hard(nn.Module):
        def forward(self, x):
            return F.gumbel_softmax(x, hard=True)

    def norm(self):
        return self.Hard()


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
