"""Spaces of sizes: counts, strings, sub-networks against the plain networks, what they hold, cost."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.blocks import blocks_of
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.mobilenet import MobileNet, small_mobilenet
from fl_lightning.nas.spaces.mobilenet_layers import MobileNetLayers
from fl_lightning.nas.spaces.resnet import ResNet, small_resnet
from fl_lightning.nas.spaces.space import Networks, SearchSpace
from fl_lightning.nas.spaces.subnetwork import sort_channels
from fl_lightning.nas.spaces.vit import ViT, small_vit

TINY_MOBILENET = MobileNet(
    depths=(1, 2),
    widths=(8, 8, 8, 16, 16, 24),
    strides=(1, 2, 2),
    squeeze=(False, True, False),
    swish=(False, False, True),
)
TINY_RESNET = ResNet(
    stem=8,
    channels=(32, 64),
    strides=(1, 2),
    stem_strides=(1, 1),
    widths=(0.5, 1.0),
    depths=((1, 2), (2, 3)),
    expansions=(0.25, 0.5),
)
TINY_VIT = ViT(
    image_side=12,
    patch=4,
    features=(24, 32),
    heads=(1, 3),
    ratios=(1.5, 2.0),
    depths=(1, 3),
    head_features=8,
)
TINY = pytest.mark.parametrize(
    "space", [TINY_MOBILENET, TINY_RESNET, TINY_VIT], ids=lambda s: s.name
)
LAYERS = MobileNetLayers()


def side_of(space):
    return space.image_side if isinstance(space, ViT) else 13


def strange_supernet(space):
    """Of float64, every number moved: no matrix an identity, no statistic 0 or 1."""
    torch.manual_seed(1)
    network = space.supernet(num_classes=5, in_channels=2).double()
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return network


def images(space, count=4):
    side = side_of(space)
    return torch.randn(
        count, 2, side, side, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


def some(space, count=6):
    generator = torch.Generator().manual_seed(3)
    return [space.smallest, space.largest, *(space.sample(generator) for _ in range(count))]


def test_the_mobilenet_space_has_its_published_size():
    space = MobileNet()
    assert space.size == 7371**5
    assert f"{space.size:.3g}" == "2.18e+19"
    assert MobileNet(widths=(16, 16, 24, 960, 1280), strides=(2, 2), squeeze=(False, False),
                     swish=(False, False)).size == 7371  # fmt: skip


def test_published_extremes_of_the_mobilenet_space():
    """Parameters of the released supernet's largest network, without the kernels' matrices."""
    space = MobileNet()
    assert space.cost(space.largest, side=224, num_classes=1000).params == 7_664_760


@TINY
def test_every_architecture_is_counted_once(space):
    if space.size > 20_000:
        space = MobileNet(
            kernels=(3, 5), expansions=(3, 4), depths=(1, 2), widths=space.widths,
            strides=space.strides, squeeze=space.squeeze, swish=space.swish,
        )  # fmt: skip
    texts = [str(architecture) for architecture in space.enumerate()]
    assert len(texts) == len(set(texts)) == space.size
    assert all(str(space.parse(text)) == text for text in texts)


def test_too_many_to_enumerate():
    with pytest.raises(ConfigurationError, match="too many"):
        next(MobileNet().enumerate())


@settings(max_examples=200)
@given(
    st.sampled_from(
        [small_mobilenet(), ResNet(), small_resnet(), ViT(), small_vit(), LAYERS, DARTS()]
    ),
    st.data(),
)
def test_strings_round_trip(space, data):
    choices = [data.draw(st.integers(0, len(decision.options) - 1)) for decision in space.decisions]
    architecture = space.architecture(choices)
    assert space.parse(str(architecture)) == architecture
    assert space.text(choices) == str(architecture)  # idle choices are not told


@settings(max_examples=200)
@given(st.integers(0, 60), st.characters(min_codepoint=33, max_codepoint=126))
def test_a_wrong_character_is_found_or_means_another_architecture(place, character):
    right = str(TINY_RESNET.largest)
    wrong = right[:place] + character + right[place + 1 :]
    try:
        assert str(TINY_RESNET.parse(wrong)) == wrong
    except ConfigurationError as error:
        assert re.search(r"character \d+ is|it ends there", str(error))  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k3e3|k3e3", None),
        (
            "k4e3|k3e3",
            "after 'k' character 2 is '4e3'; expected the kernel of stage 1 block 1: 3, 5, 7",
        ),
        ("k3e3", "after 'k3e3' it ends there; expected '|'"),
        ("k3e3-k3e3-k3e3|k3e3", "character 10 is '-'; expected '|'"),
        ("k3e3|k3e3|k3e3", "character 10 is '|'; expected its end"),
    ],
)
def test_what_does_not_parse_says_where(text, message):
    if message is None:
        assert str(TINY_MOBILENET.parse(text)) == text
    else:
        with pytest.raises(ConfigurationError, match=message.replace("|", r"\|")):
            TINY_MOBILENET.parse(text)


def test_a_depth_between_two_options_is_refused():
    with pytest.raises(ConfigurationError, match="network has 2 blocks so far; allowed: 1, 3"):
        TINY_VIT.parse("d24:h1m1.5-h3m2")


def test_choices_of_blocks_that_are_not_there_do_not_count():
    choices = list(TINY_RESNET.smallest.choices)
    choices[3] = 1  # of the second block, while the depth is one
    assert TINY_RESNET.architecture(choices) == TINY_RESNET.smallest


@TINY
@pytest.mark.parametrize("training", [True, False])
def test_a_part_of_the_supernet_is_the_plain_network(space, training):
    network, x = strange_supernet(space), images(space)
    for architecture in some(space):
        network.train(training)
        plain = space.extract(network, architecture)
        assert not any(type(layer).__name__.startswith("Elastic") and "Depth" not in type(layer).__name__
                       for layer in plain.modules())  # fmt: skip
        expected = plain(x)
        torch.testing.assert_close(network(x, architecture), expected, rtol=1e-12, atol=1e-12)


@TINY
def test_the_largest_part_is_the_whole_bit_for_bit(space):
    network, x = strange_supernet(space).eval(), images(space)
    plain = space.extract(network, space.largest)
    assert torch.equal(network(x), network(x, space.largest))
    torch.testing.assert_close(plain(x), network(x), rtol=0, atol=0)


@TINY
def test_training_moves_what_is_held_and_nothing_else(space):
    network, x = strange_supernet(space), images(space, 8)
    for architecture in some(space, 3):
        network.zero_grad(set_to_none=True)
        (network(x, architecture) * torch.randn(8, 5)).sum().backward()
        for name, mask in space.held(network, architecture).items():
            gradient = network.get_parameter(name).grad
            moved = torch.zeros_like(mask) if gradient is None else gradient != 0
            assert not (moved & ~mask).any(), name
            if mask.any() and "bias" not in name:
                # ReLUs that never open leave a few coordinates without a gradient
                assert moved.sum() >= 0.5 * mask.sum(), name


@TINY
def test_gradients_are_those_of_the_plain_network(space):
    network, x = strange_supernet(space), images(space)
    for architecture in some(space, 2):
        plain = space.extract(network, architecture)
        network.zero_grad(set_to_none=True)
        for run in (lambda: network(x, architecture), lambda: plain(x)):  # noqa: B023
            run().square().sum().backward()
        held = space.held(network, architecture)
        for name, own in plain.named_parameters():
            if "conv_dw" not in name:
                found = network.get_parameter(name).grad[held[name]]
                expected = own.grad.flatten()
                error = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
                assert error < 1e-12, name


@TINY
def test_as_much_is_held_as_the_plain_network_has(space):
    network = space.supernet(num_classes=5)
    for architecture in some(space):
        held = space.held(network, architecture)
        plain = dict(space.build(architecture, num_classes=5).named_parameters())
        expected = {name: own.numel() for name, own in plain.items() if "conv_dw" not in name}
        for name, mask in held.items():
            if "conv_dw" not in name:
                assert mask.sum() == expected.get(name, 0), name


@pytest.mark.parametrize(
    ("kernel", "numbers"), [(7, (49, 0, 0)), (5, (25, 625, 0)), (3, (25, 225, 81))]
)
def test_what_a_smaller_kernel_holds(kernel, numbers):
    network = TINY_MOBILENET.supernet(num_classes=5)
    part = TINY_MOBILENET.parse(f"k{kernel}e3|k3e3")
    held = TINY_MOBILENET.held(network, part)
    names = ("weight", "matrices.5", "matrices.3")
    found = [int(held[f"stages.0.0.conv_dw.{name}"].sum()) for name in names]
    assert found == [24 * numbers[0], *numbers[1:]]


@TINY
def test_formulas_cost_what_is_counted(space):
    for architecture in some(space, 4):
        networks = Networks(space, side_of(space), {"in_channels": 2, "num_classes": 7})
        assert networks.cost(architecture) == SearchSpace.counted(space, architecture, networks)


@pytest.mark.parametrize("space", [MobileNet(), ResNet()])
def test_formulas_cost_what_is_counted_at_published_sizes(space):
    architecture = space.sample(torch.Generator().manual_seed(0))
    networks = Networks(space, 64, {"in_channels": 3, "num_classes": 10})
    assert networks.cost(architecture) == SearchSpace.counted(space, architecture, networks)


def test_a_network_resizes_its_images_before_the_stem():
    """At every resolution it computes, and costs, what the plain network does on resized images."""
    space = replace(TINY_MOBILENET, resolutions=(9, 13))
    assert space.size == 2 * TINY_MOBILENET.size
    torch.manual_seed(0)
    network = space.supernet(num_classes=5, in_channels=2).double().eval()
    x = images(space)
    for side, same in ((9, "k3e3|k5e4-k3e6"), (13, "k7e3-k5e4|k3e3")):
        architecture = space.parse(f"r{side}:{same}")
        assert str(architecture) == f"r{side}:{same}"
        part = space.extract(network, architecture)
        assert torch.allclose(network(x, architecture), part(x), rtol=1e-12, atol=1e-12)
        resized = nn.functional.interpolate(x, (side, side), mode="bilinear", antialias=True)
        plain = TINY_MOBILENET.build(TINY_MOBILENET.parse(same), num_classes=5, in_channels=2)
        plain.double().eval().load_state_dict(part.state_dict())
        assert torch.equal(part(x), plain(resized))
        ours = space.cost(architecture, side=13)
        expected = TINY_MOBILENET.cost(TINY_MOBILENET.parse(same), side=side)
        assert (ours.flops, ours.params) == (expected.flops, expected.params)
        networks = Networks(space, 13, {"in_channels": 3, "num_classes": 10})
        assert ours == SearchSpace.counted(space, architecture, networks)
    with pytest.raises(ConfigurationError, match=r"leave sizes\.resolutions empty"):
        MobileNetLayers(space)
    with pytest.raises(ConfigurationError, match="has several resolutions"):
        blocks_of(networks)


def test_a_transformer_is_for_one_side():
    with pytest.raises(
        ConfigurationError, match="image_side of the space is 12 pixels, and images have 32"
    ):
        TINY_VIT.cost(TINY_VIT.largest, side=32)


@TINY
def test_sorted_channels_compute_the_same(space):
    network, x = strange_supernet(space).eval(), images(space)
    before, part = network(x), network(x, space.smallest)
    sort_channels(network)
    scale = before.abs().max()
    torch.testing.assert_close(network(x) / scale, before / scale, rtol=0, atol=1e-12)
    assert not torch.allclose(network(x, space.smallest), part)


@TINY
def test_sorting_keeps_what_sub_networks_compute_that_are_trained_already(space):
    network, x = strange_supernet(space).eval(), images(space)
    before = network(x, space.smallest)
    sort_channels(network, [space.build(space.smallest, num_classes=5, in_channels=2)])
    torch.testing.assert_close(network(x, space.smallest), before, rtol=1e-12, atol=1e-12)


def test_sorted_channels_fall_in_importance():
    network = strange_supernet(TINY_MOBILENET)
    sort_channels(network)
    for block in network.stages[0]:
        importance = block.conv_pwl.weight.abs().sum((0, 2, 3))
        assert (importance.diff() <= 0).all()


def test_an_architecture_of_another_space_is_refused():
    network = TINY_RESNET.supernet(num_classes=5)
    with pytest.raises(
        ConfigurationError, match="resnet cannot use an architecture of another space"
    ):
        network(torch.zeros(1, 3, 13, 13), TINY_MOBILENET.smallest)
    with pytest.raises(ConfigurationError, match="another space"):
        TINY_RESNET.build(small_resnet().largest, num_classes=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MobileNet(kernels=(3, 4)), "kernels must be odd"),
        (
            lambda: MobileNet(depths=(4, 2)),
            "options of depth must be different numbers in rising order",
        ),
        (lambda: MobileNet(strides=(1, 2)), "for n stages give n \\+ 4 widths"),
        (
            lambda: MobileNet(expansions=(0, 3)),
            r"expansions must be above 0 and finite, got \(0, 3\)",
        ),
        (
            lambda: ResNet(strides=(1, 2)),
            "channels, strides and depths must have one entry per stage",
        ),
        (lambda: ViT(patch=5), "patch must divide image_side, got 5 and 32"),
        (
            lambda: ViT(head_features=0),
            "numbers in head_features must be above 0 and finite, got 0",
        ),
        (
            lambda: ViT(ratios=(1.0, "two")),
            r"ratios must be a list \(each entry a number\), got \(1.0, 'two'\)",
        ),
        (lambda: ResNet(stem=True), "stem must be a whole number, got True"),
        (lambda: ResNet(widths=0.5), r"widths must be a list \(each entry a number\), got 0.5"),
        (lambda: ResNet(channels=[-1, 2, 3, 4]), "channels must be above 0 and finite, got"),
        (lambda: ResNet(stem_strides=(2,)), "stem_strides must be two numbers, of"),
        (
            lambda: ResNet(depths=(1, 2)),
            r"depths must be a list \(each entry a list \(each entry a whole",
        ),
        (lambda: MobileNet(swish=[1, 0]), r"swish must be a list \(each entry True or False\)"),
        (lambda: MobileNetLayers(3), "sizes must be a MobileNet or None, got 3"),
        (lambda: MobileNetLayers(TINY_VIT), "sizes must be a MobileNet or None, got ViT"),
    ],
)
def test_spaces_that_make_no_sense(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_lists_make_the_same_space_as_tuples():
    assert MobileNet(kernels=[3, 5, 7]) == MobileNet()
    assert ResNet(depths=[[2, 3, 4], [2, 3, 4], [4, 5, 6], [2, 3, 4]]) == ResNet()
