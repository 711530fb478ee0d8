"""Which parameters a mask may cover, in transformers, convolutional networks and modules around them."""

import pytest
import timm
from networks import tiny_vit
from torch import nn

from fl_lightning import ImageClassifier
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import LeNet
from fl_lightning.sparsity import maskable_names


def test_a_vision_transformer_without_embeddings_and_head():
    names = maskable_names(tiny_vit(qk_norm=True, init_values=0.1))
    layers = ("norm1", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.proj", "norm2")
    inside = [*layers, "mlp.fc1", "mlp.fc2"]
    blocks = [f"blocks.{i}.{layer}.{kind}" for i in (0, 1) for layer in inside
              for kind in ("weight", "bias")]  # fmt: skip
    assert names == [*blocks, "norm.weight", "norm.bias"]  # layer scale is none of these layers


def test_the_same_inside_a_lightning_module():
    module = ImageClassifier(
        "vit_tiny_patch16_224",
        num_classes=4,
        image_size=16,
        freeze_blocks=1,
        network_kwargs={"patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3},
    )
    names = maskable_names(module)
    assert names == [f"network.{n}" for n in maskable_names(tiny_vit()) if "blocks.0." not in n]


def test_convolutional_networks():
    assert maskable_names(LeNet()) == [
        n for n, _ in LeNet().named_parameters() if not n.startswith("head.")
    ]
    resnet = timm.create_model("resnet10t")
    expected = [n for n, _ in resnet.named_parameters() if not n.startswith("fc.")]
    assert maskable_names(resnet) == expected


def test_attention_of_torch_and_norms_of_others():
    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 4).bias.data))

    module = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2),
            "norm": RMSNorm(),
            "table": nn.Embedding(3, 4),
            "act": nn.PReLU(),
        }
    )
    assert maskable_names(module) == [
        *("attention.in_proj_weight", "attention.in_proj_bias"),
        *("attention.out_proj.weight", "attention.out_proj.bias", "norm.scale"),
    ]


def test_patterns():
    vit = tiny_vit()
    assert maskable_names(vit, include=["*.qkv.weight", "head.*"], exclude=["blocks.0.*"]) == [
        "blocks.1.attn.qkv.weight",
        "head.weight",
        "head.bias",
    ]
    assert maskable_names(vit, exclude=["blocks.*"]) == ["norm.weight", "norm.bias"]
    for options, message in [
        ({"include": ["*.qvk.*"]}, r"include: \*\.qvk\.\* matches no parameter that trains"),
        ({"exclude": ["norm"]}, "exclude: norm matches no parameter"),
        ({"exclude": "norm.*"}, "is a list of patterns"),
        ({"exclude": ["*"]}, "trainable parameters .* may be masked"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            maskable_names(vit, **options)
    vit.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="of the 0 trainable parameters"):
        maskable_names(vit)
