"""Layers whose parameters, buffers or backward are out of the ordinary."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from strange.rows import FIRST_HAS_ONE, FULL, TOKENS, Small, case, insert, row


class Adapted(Small):
    """Trains what is not frozen by Adam."""

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


def old(change):
    """Return a change of the first layer in the form before parametrizations, of which torch warns."""

    def prepare(m):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            change(m.net[0])

    return prepare


class _LowRank(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.down = nn.Parameter(0.1 * torch.randn(2, columns))
        self.up = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight):
        return weight + self.up @ self.down


def low_rank(m):
    """LoRA by hand: the weights are frozen, their change has rank 2."""
    for layer in (m.net[0], m.net[2]):
        layer.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", _LowRank(*layer.weight.shape))


def low_rank_by_peft(m):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["0", "2"])
    m.net = peft.get_peft_model(m.net, config)


# Spectral norm's buffers take a step of the power method at every use
case("WeightNorm", prepare=lambda m: parametrizations.weight_norm(m.net[0]))
case("OldWeightNorm", prepare=old(nn.utils.weight_norm))
case("SpectralNorm", prepare=lambda m: parametrizations.spectral_norm(m.net[0]))
case("OldSpectralNorm", prepare=old(nn.utils.spectral_norm))
case("LowRankByParametrization", Adapted, prepare=low_rank)
case("LowRankByPeft", Adapted, prepare=low_rank_by_peft)
case("CompiledSubmodule", is_slow=True, prepare=lambda m: setattr(m, "net", torch.compile(m.net)))


@row(data=TOKENS)
class TiedWeights(Small):
    momentum = 0.9

    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.net.weight

    def loss(self, batch):
        return F.cross_entropy(self.out(self.net(batch[0])).flatten(0, 1), batch[1].flatten())


class _OverChannels(nn.Sequential):
    """Reads eight numbers as two channels of four."""

    def __init__(self, norm):
        super().__init__(nn.Unflatten(1, (2, 4)), norm, nn.Flatten())


def batch_norm(**options):
    return lambda: nn.BatchNorm1d(8, **options)


OF_INTEGERS, OF_ONE = "counts its updates in an integer buffer", "more than 1 value per channel"
# a layer after the first: name, layer, and what differs from a row that either engine may train
AFTER_THE_FIRST = [
    ("BatchNorm", batch_norm(), {"shards": FULL}),
    ("BatchNormRagged", batch_norm(), {}),
    # its rate is one over the number of batches that it saw
    ("BatchNormCumulative", batch_norm(momentum=None), {"shards": FULL, "refused": OF_INTEGERS}),
    ("BatchNormWithoutStatistics", batch_norm(track_running_stats=False), {"shards": FULL}),
    ("BatchNormOfOne", batch_norm(), {"shards": FIRST_HAS_ONE, "refused": OF_ONE}),
    (
        "InstanceNormWithStatistics",
        lambda: _OverChannels(nn.InstanceNorm1d(2, track_running_stats=True)),
        {},
    ),
    ("Dropped", lambda: nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.1), nn.RReLU()), {}),
]
for name, layer, apart in AFTER_THE_FIRST:
    case(name, prepare=insert(1, layer), **apart)
case(
    "FrozenBatchNorm",
    prepare=insert(1, lambda: nn.BatchNorm1d(8).requires_grad_(False)),
    on_train_epoch_start=lambda m: m.net[1].eval(),
)
