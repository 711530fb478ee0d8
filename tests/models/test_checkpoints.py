import argparse
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.models import LeNet
from fl_lightning.models.checkpoints import load_backbone

TINY = {"embed_dim": 12, "depth": 2, "num_heads": 3}
DINO = "vit_small_patch16_224.dino"


def dino_backbone(dim=384, depth=12, patch=16, tokens=197):
    """Names and shapes of the backbone that DINO publishes, here ViT-S/16, with random values."""
    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, tokens, dim),
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.{norm}.{part}": (dim,)
            for norm in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        linear = {"attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim)}
        linear |= {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
        for name, shape in linear.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
    shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def dino_training_checkpoint(backbone):
    """The layout of DINO's full checkpoint: two networks with their projection heads, and more."""
    head = {
        "head.mlp.0.weight": torch.zeros(8, 12),
        "head.mlp.0.bias": torch.zeros(8),
        "head.last_layer.weight_g": torch.zeros(16, 1),
        "head.last_layer.weight_v": torch.zeros(16, 8),
    }
    teacher = {f"backbone.{name}": tensor for name, tensor in backbone.items()} | head
    student = {f"module.{name}": torch.zeros_like(tensor) for name, tensor in teacher.items()}
    return {
        "student": student,
        "teacher": teacher,
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", patch_size=16),
        "dino_loss": {"center": torch.zeros(1, 16)},
    }


def tiny_vit(**arguments):
    return timm.create_model(DINO, **{"img_size": 32, "num_classes": 5, **TINY, **arguments})


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return dino_backbone(dim=12, depth=2, tokens=5)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "weights.pth")


def assert_holds(network, tensors):
    state = network.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_the_published_dino_vit_s_16_fits():
    with torch.device("meta"):
        published, network = dino_backbone(), timm.create_model(DINO, num_classes=100)
    assert sum(tensor.numel() for tensor in published.values()) == 21_665_664
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    assert {name: tensor.shape for name, tensor in published.items()} == {
        name: shape for name, shape in shapes.items() if not name.startswith("head.")
    }


WRAPPED = {
    f"{prefix}{wrapper}": lambda tensors, prefix=prefix, wrapper=wrapper: {
        wrapper: {prefix + n: t for n, t in tensors.items()},
        "epoch": 1,
    }
    for prefix, wrapper in [
        *(("module.", "teacher"), ("backbone.", "student"), ("model.", "state_dict")),
        *(("network.", "model"), ("module.backbone.", "teacher")),
    ]
}


@pytest.mark.parametrize("form", [*WRAPPED, "as it is", "training", "safetensors"])
def test_a_backbone_loads_bit_for_bit_from_every_form_and_the_head_stays(form, tmp_path, backbone):
    """Of DINO's full checkpoint it is the teacher."""
    path = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        save_file(backbone, path)
    else:
        forms = {"as it is": dict, "training": dino_training_checkpoint, **WRAPPED}
        torch.save(forms[form](backbone), path)
    network = tiny_vit()
    fresh_head = network.head.weight.clone()
    load_backbone(network, str(path))
    assert_holds(network, backbone)
    assert torch.equal(network.head.weight, fresh_head)


def test_a_prefix_that_the_network_itself_has_stays(path):
    network = nn.Sequential()
    network.add_module("model", nn.Linear(2, 2))
    torch.save({"model.weight": torch.ones(2, 2), "model.bias": torch.ones(2)}, path)
    load_backbone(network, path)
    assert network.model.weight.sum() == 4


def test_positions_of_another_image_size_are_resampled(path, backbone):
    row = torch.linspace(0, 1, 14).expand(14, 14).reshape(1, 196, 1).expand(1, 196, 12)
    backbone["pos_embed"] = torch.cat([torch.full((1, 1, 12), 7.0), row], dim=1)
    torch.save(backbone, path)
    network = tiny_vit(img_size=64)
    load_backbone(network, path)
    assert network.pos_embed.shape == (1, 17, 12)
    assert torch.equal(network.pos_embed[:, 0], torch.full((1, 12), 7.0))
    grid = network.pos_embed[0, 1:, 0].view(4, 4)
    assert torch.allclose(grid, grid[0].expand(4, 4), atol=1e-5)  # still a ramp, along one side
    assert torch.all(grid.diff(dim=1) > 0.1)
    assert_holds(network, {n: t for n, t in backbone.items() if n != "pos_embed"})


def test_positions_without_a_class_token_are_resampled(path):
    arguments = {"class_token": False, "global_pool": "avg"}
    torch.save(tiny_vit(img_size=64, **arguments).state_dict(), path)
    network = tiny_vit(**arguments)
    load_backbone(network, path)
    assert network.pos_embed.shape == (1, 4, 12)


def test_positions_off_a_square_grid_are_refused(path, backbone):
    backbone["pos_embed"] = torch.zeros(1, 8, 12)
    torch.save(backbone, path)
    with pytest.raises(ConfigurationError, match=r"pos_embed \(1, 8, 12\) instead of \(1, 5, 12\)"):
        load_backbone(tiny_vit(), path)


def test_a_classifier_that_fits_is_loaded_and_another_is_not(path):
    source = tiny_vit()
    torch.save(source.state_dict(), path)
    same, other = tiny_vit(), tiny_vit(num_classes=7)
    fresh = other.head.weight.clone()
    load_backbone(same, path)
    load_backbone(other, path)
    assert_holds(same, source.state_dict())
    assert torch.equal(other.head.weight, fresh)
    assert torch.equal(other.norm.weight, source.norm.weight)
    state = source.state_dict()
    del state["head.bias"]  # half a classifier is none
    torch.save(state, path)
    half = tiny_vit()
    fresh = half.head.weight.clone()
    load_backbone(half, path)
    assert torch.equal(half.head.weight, fresh)


def test_batch_norm_statistics_are_part_of_the_backbone(path):
    source = timm.create_model("resnet10t", num_classes=3)
    source.bn1.running_mean.fill_(3.0)
    torch.save(source.state_dict(), path)
    network = timm.create_model("resnet10t", num_classes=5)
    load_backbone(network, path)
    assert torch.equal(network.bn1.running_mean, source.bn1.running_mean)
    state = source.state_dict()
    del state["bn1.running_mean"]
    torch.save(state, path)
    with pytest.raises(ConfigurationError, match=r"1 missing: bn1\.running_mean"):
        load_backbone(network, path)


def test_files_that_do_not_fit_are_refused_by_name(path, backbone):
    del backbone["norm.bias"]
    backbone["norm.weight"] = torch.zeros(3)
    backbone |= {f"decoder.{i}": torch.zeros(1) for i in range(5)}
    torch.save(backbone, path)
    network = tiny_vit()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ConfigurationError) as refusal:
        load_backbone(network, path)
    message = str(refusal.value)
    assert path in message
    assert "1 missing: norm.bias" in message
    assert "1 of another shape: norm.weight (3,) instead of (12,)" in message
    assert "5 unexpected: decoder.0, decoder.1, decoder.2, …" in message
    assert_holds(network, before)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no file .*weights.pth"),
        (b"these are no tensors", "could not be read"),
        ({"weight": print}, "could not be read"),  # code in a file does not run
        ([1, 2], "not a state dict.* holds list"),
        ({}, "not a state dict.* holds dict"),
        ({"epoch": 3}, "not a state dict.* holds a dict of epoch"),
        (torch.zeros(2), "not a state dict.* holds Tensor"),
    ],
)
def test_what_is_no_file_of_weights_is_refused(path, content, says):
    if isinstance(content, bytes):
        Path(path).write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigurationError, match=says):
        load_backbone(LeNet(), path)


def test_broken_safetensors_are_refused(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"these are no tensors")
    with pytest.raises(ConfigurationError, match="could not be read"):
        load_backbone(LeNet(), str(tmp_path / "broken.safetensors"))


def test_heads_are_found_by_the_network_itself():
    assert head_names(timm.create_model("resnet10t")) == ["fc"]
    assert head_names(tiny_vit()) == ["head"]
    assert head_names(nn.Linear(1, 1)) == []
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", **TINY)
    assert head_names(distilled) == ["head", "head_dist"]
