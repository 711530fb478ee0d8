"""Layers whose parameters, buffers or backward are out of the ordinary."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from strange.rows import FIRST_HAS_ONE, FULL, TOKENS, Classifies, Small, row


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


@row(shards=FULL, refused="counts its updates in an integer buffer")
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
