"""Masks: what they hold, say and save; counts; what of a model they are for."""

import pickle
from itertools import combinations

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import tiny_vit
from safetensors.torch import load
from torch import nn

from fl_lightning import ImageClassifier
from fl_lightning.callbacks.calibration.mask_report import density_figure
from fl_lightning.core.container import read, write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import LeNet
from fl_lightning.sparsity import (
    Mask,
    density_per_layer,
    intersection,
    jaccard_overlap,
    load_mask,
    majority,
    maskable_names,
    save_mask,
    union,
)
from fl_lightning.sparsity.tasks.merging import MaskCounts

SHAPES = {"a": (3, 5), "b": (), "c": (0, 2), "d": (9,)}


@st.composite
def masks(draw, most=1):
    def bits(shape):
        size = int(torch.Size(shape).numel())
        flat = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return torch.tensor(flat, dtype=torch.bool).view(shape)

    count = draw(st.integers(1, most))
    found = [Mask({name: bits(shape) for name, shape in SHAPES.items()}) for _ in range(count)]
    return found if most > 1 else found[0]


def active(mask):
    return {
        (name, i) for name in mask for i, bit in enumerate(mask[name].flatten().tolist()) if bit
    }


def mask_of(**bits):
    return Mask({name: torch.tensor(value, dtype=torch.bool) for name, value in bits.items()})


@given(mask=masks())
def test_counts_and_round_trips(mask):
    assert mask.num_active == len(active(mask)) == sum(mask.active_per_tensor.values())
    assert mask.num_entries == 25
    assert mask.density + mask.sparsity == 1
    again = Mask.from_state_dict(mask.state_dict())
    assert all(torch.equal(again[name], mask[name]) for name in SHAPES)
    assert again == mask == pickle.loads(pickle.dumps(mask))
    assert hash(again) == hash(mask) == hash(mask.to("cpu"))
    assert sum(bits.numel() for bits in mask.state_dict()["bits"].values()) == 2 + 1 + 0 + 2


def test_the_hash_is_that_of_names_shapes_and_bits_in_any_order():
    mask = mask_of(a=[1, 0], b=[0, 1])
    assert mask == mask_of(b=[0, 1], a=[1, 0])
    others = [mask_of(a=[1, 0], c=[0, 1]), mask_of(a=[[1, 0]], b=[0, 1]), mask_of(a=[1, 0])]
    others += [mask_of(a=[1, 0], b=[0, 1, 0]), mask_of(a=[1, 0], b=[1, 1])]
    assert len({mask.hash(), *(other.hash() for other in others)}) == 6
    assert (
        mask.hash() == "caa9d87d5b38ae63efcb3bb185ffd885"
    )  # another layout of packed bits needs another VERSION


@given(several=masks(most=5))
def test_set_algebra(several):
    sets = [active(mask) for mask in several]
    votes = {entry: sum(entry in s for s in sets) for entry in set().union(*sets)}
    assert active(union(several)) == set().union(*sets)
    assert active(intersection(several)) == set.intersection(*sets)
    assert active(majority(several)) == {e for e, n in votes.items() if 2 * n > len(sets)}
    assert union(several) == union(several[::-1]) == union([*several, several[0]])
    overlap = jaccard_overlap(several[0], several[-1])
    joint = sets[0] | sets[-1]
    assert overlap == (len(sets[0] & sets[-1]) / len(joint) if joint else 1)
    assert jaccard_overlap(several[0], several[0]) == 1


def test_masks_of_different_tensors_do_not_merge():
    with pytest.raises(ConfigurationError, match=r"mask 1 differs from mask 0 in a, b"):
        union([mask_of(a=[1, 0]), mask_of(a=[1], b=[1])])
    with pytest.raises(ConfigurationError, match="no masks"):
        majority([])


@given(mask=masks())
def test_a_file_gives_the_mask_back(mask, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "new folder" / "mask.safetensors"
    save_mask(mask, path)
    assert load_mask(path) == mask
    assert list(load_mask(path)) == list(mask)
    assert load(path.read_bytes()).keys() == mask.keys()  # other tools can look into it


def damaged(path, fields=None, drop=(), **tensors):
    """Write the file at a path again with changes, its checksum right."""
    found, kept = read(path.read_bytes(), "mask")
    kept = {name: tensor for name, tensor in kept.items() if name not in drop}
    path.write_bytes(write("mask", {**found, **(fields or {})}, {**kept, **tensors}))


def byte(value):
    return torch.tensor([value], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": byte(3)}, "a damaged mask: its hash is"),
        ({"fields": {"shapes": [["a", [2]], ["b", [20]]]}}, r"b of shape \(20,\) needs 3 bytes"),
        ({"fields": {"shapes": [["a", [2]], ["b", [4]]]}}, "its hash is"),
        ({"fields": {"shapes": "no"}}, "a name must be a text"),
        ({"fields": {"shapes": 3}}, "no file of a mask"),
        ({"fields": {"version": 1.0}}, "version must be a whole number"),
        ({"fields": {"shapes": [["a", [2]], ["a", [2]], ["b", [3]]]}}, "canonical form"),
        ({"fields": {"shapes": [["a", [-2]]]}}, "shape of a must be a whole number"),
        ({"fields": {"code": "x"}}, "has the unknown field 'code'"),
        ({"drop": ("b",)}, "name different tensors, b"),
        ({"fields": {"version": 2}}, "version 2, and this release reads version 1"),
    ],
)
def test_damaged_files_are_refused_with_what_is_wrong(changes, message, tmp_path):
    path = tmp_path / "mask.safetensors"
    save_mask(mask_of(a=[1, 0], b=[0, 1, 1]), path)
    damaged(path, **changes)
    with pytest.raises(ConfigurationError, match=message):
        load_mask(path)


def test_what_is_no_file_of_a_mask_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no file"):
        load_mask(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigurationError, match="no file of a mask"):
        load_mask(tmp_path / "text")
    with pytest.raises(ConfigurationError, match=r"a is torch\.float32"):
        Mask({"a": torch.ones(2)})


def test_a_mask_refuses_another_model_with_the_names_that_differ():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    mask = Mask.ones(dict(module.named_parameters()))
    mask.check_fits(module)
    assert mask.density == 1
    mask.check_fits(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2)))
    with pytest.raises(
        ConfigurationError,
        match=r"missing: 1\.bias; of another shape: 1\.weight \(4, 3\) instead of \(2, 3\)",
    ):
        mask.check_fits(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False)))


@given(mask=masks())
def test_rows_of_a_report_add_up(mask):
    for depth in (None, 1):
        rows = density_per_layer(mask, depth)
        assert sum(row.num_active for row in rows) == mask.num_active
        assert sum(row.num_entries for row in rows) == mask.num_entries


def test_the_axis_of_densities_ends_at_1():
    figure = density_figure(Mask({"a": torch.ones(4).bool(), "b": torch.arange(4) < 1}))
    assert max(figure.axes[0].get_xticks()) == 1


def masks_of(bits):
    return [Mask({"a": torch.tensor(row[:2]), "b": torch.tensor(row[2:])}) for row in bits]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=6))
def test_they_are_those_of_all_pairs(bits):
    masks = masks_of(bits)
    counts = MaskCounts(masks)
    pairs = list(combinations(masks, 2))
    shared = sum(intersection(pair).num_active for pair in pairs)
    either = sum(union(pair).num_active for pair in pairs)
    assert counts.density == pytest.approx(np.mean([mask.density for mask in masks]))
    assert counts.union_density == pytest.approx(union(masks).density)
    assert counts.overlap == pytest.approx(shared / either if either else 1.0)
    assert MaskCounts(masks[:2]).overlap == pytest.approx(jaccard_overlap(*masks[:2]))


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
        ({"exclude": "norm.*"}, "must be a list of patterns"),
        ({"exclude": ["*"]}, "no parameter of .* is left for a mask; its .* trainable parameters"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            maskable_names(vit, **options)
    vit.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="has no trainable parameters"):
        maskable_names(vit)
