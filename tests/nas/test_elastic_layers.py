"""Elastic layers: vectors of the kernel, views without copies, timm's blocks as the oracle."""

import pytest
import torch
from timm.layers import make_divisible
from timm.models._efficientnet_blocks import InvertedResidual as TimmInvertedResidual
from timm.models._efficientnet_blocks import SqueezeExcite as TimmSqueezeExcite
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.choices import ValueChoice
from fl_lightning.nas.spaces.elastic import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticDepthwise,
    ElasticLayerNorm,
    ElasticLinear,
    multiple_of_8,
)
from fl_lightning.nas.spaces.mobilenet import Block, InvertedResidual
from fl_lightning.nas.spaces.vit import ViT

KERNEL = ValueChoice([3, 5, 7], "kernel")


def counted_kernel():
    layer = ElasticDepthwise(1, KERNEL)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(49.0).view(1, 1, 7, 7))
    return layer


def test_a_matrix_adds_what_its_row_says():
    layer = counted_kernel()
    with torch.no_grad():
        layer.matrices["5"][12, 0] = 1
    assert layer.kernel(5, 1)[0, 0, 2, 2] == 32
    assert layer.kernel(3, 1)[0, 0, 1, 1] == 32
    assert layer.kernel(7, 1)[0, 0, 3, 3] == 24


def test_an_even_kernel_is_refused():
    with pytest.raises(ConfigurationError, match="odd numbers, got \\(3, 4\\)"):
        ElasticDepthwise(2, ValueChoice([3, 4], "kernel"))


@pytest.mark.parametrize(
    ("elastic", "plain", "x"),
    [
        (ElasticConv2d(6, 4, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1), (2, 6, 5, 5)),
        (ElasticLinear(6, 4), nn.Linear(6, 4), (2, 6)),
        (ElasticLayerNorm(6), nn.LayerNorm(6), (2, 6)),
        (ElasticBatchNorm2d(6), nn.BatchNorm2d(6), (2, 6, 5, 5)),
    ],
)
def test_a_whole_layer_is_pytorchs_bit_for_bit(elastic, plain, x):
    plain.load_state_dict(elastic.state_dict())
    x = torch.randn(x)
    assert torch.equal(elastic(x), plain(x))
    assert all(
        torch.equal(own, plain.state_dict()[name]) for name, own in elastic.state_dict().items()
    )


def test_batch_norm_moves_the_first_statistics_alone():
    layer, plain = ElasticBatchNorm2d(6), nn.BatchNorm2d(4)
    x = torch.randn(3, 4, 5, 5)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_mean[:4], plain.running_mean)
    assert torch.equal(layer.running_var[:4], plain.running_var)
    assert layer.running_mean[4:].tolist() == [0, 0]
    assert layer.running_var[4:].tolist() == [1, 1]
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("channels", [1, 7.9, 11, 12, 20, 30, 35, 166.4, 307.2, 409.6, 1331.2])
def test_channels_round_as_in_timm(channels):
    assert multiple_of_8(channels) == make_divisible(channels, 8)


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("elastic", [False, True])
def test_an_inverted_residual_is_timms(squeeze, elastic):
    torch.manual_seed(0)
    kernel = ValueChoice([3, 5], "kernel") if elastic else 5
    block = InvertedResidual(Block(16, 16, 1, squeeze, True, kernel, 4))

    def excite(channels, **kwargs):
        return TimmSqueezeExcite(
            channels,
            rd_channels=make_divisible(channels // 4, 8),
            gate_layer="hard_sigmoid",
            force_act_layer=nn.ReLU,
        )

    timms = TimmInvertedResidual(
        16, 16, 5, exp_ratio=4, act_layer=nn.Hardswish, se_layer=excite if squeeze else None
    )
    tensors = {name: own for name, own in block.state_dict().items() if "matrices" not in name}
    timms.load_state_dict(tensors)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(block(x), timms(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_transformer_is_timms(elastic):
    torch.manual_seed(0)
    space = ViT(image_side=16, features=(32, 48), heads=(2, 3), depths=(1, 2), head_features=16)
    make = space.supernet if elastic else lambda **shape: space.build(space.largest, **shape)
    ours = make(num_classes=5).eval()
    timms = VisionTransformer(
        16, 4, num_classes=5, embed_dim=48, depth=2, num_heads=3, mlp_ratio=4, qkv_bias=True
    ).eval()
    state = {name.removeprefix("tokens."): value for name, value in ours.state_dict().items()}
    for number in range(2):
        for kind in ("weight", "bias"):
            names = [f"blocks.{number}.attn.{layer}.{kind}" for layer in ("query", "key", "value")]
            state[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([state.pop(n) for n in names])
    timms.load_state_dict(state)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(x), timms(x), rtol=1e-5, atol=1e-6)
