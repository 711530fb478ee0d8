"""Zero-cost proxies: closed forms on tiny networks; their rank correlation with the benchmark."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nas_bench_201_costs import benchmark_flops, benchmark_params
from small_sets import write_folder
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import LayerChoice, LayerSpace, Supernet, ZeroCostStart
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.search.proxies import (
    PROXIES,
    epe,
    fisher,
    grad_norm,
    grasp,
    jacov,
    l2_norm,
    naswot,
    plain,
    snip,
    synflow,
    zen,
)
from fl_lightning.nas.search.proxy_scores import (
    MeanRank,
    ProxyScore,
    folder_batches,
    noise_batch,
)
from fl_lightning.nas.spaces.named import NAMES
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201, NASBench201Table
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.spaces.vit import ViT

TABLE = Path(__file__).parents[3] / "shared" / "data" / "nasbench201_test_accuracy.csv"


def linear(*rows):
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def test_synflow_of_a_chain_is_its_flow_once_a_layer():
    # |W2| |W1| 1 = (1, 2) · ((3, 4) 1, (1, 0) 1) = 7 + 2, and every path crosses both layers
    network = nn.Sequential(
        linear([3.0, -4.0], [-1.0, 0.0]), nn.BatchNorm1d(2), nn.ReLU(), linear([1.0, 2.0])
    )
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert synflow(network, torch.zeros(4, 2), torch.zeros(4)) == pytest.approx(math.log1p(2 * 9))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_snip_of_a_linear_layer():
    # logits 0 and 0: p = 1/2, the gradient of row 0 is (p - 1) x, of row 1 it is p x; θ = ±1
    network = linear([1.0, -1.0], [-1.0, 1.0])
    value = snip(network, torch.tensor([[2.0, 2.0]]), torch.tensor([0]))
    assert value == pytest.approx(4 * 0.5 * 2)
    assert network.weight.grad is None


def test_norms_of_layers():
    # p = 1/2: the gradient is -x/2 in row 0 and x/2 in row 1
    network = nn.Sequential(linear([3.0], [4.0]))
    network.append(linear([1.0, 0.0], [0.0, 1.0]))
    assert l2_norm(network, torch.zeros(1, 1), torch.zeros(1)) == pytest.approx(5 + 2**0.5)
    flat = linear([2.0, 2.0], [2.0, 2.0])
    value = grad_norm(flat, torch.tensor([[3.0, 4.0]]), torch.tensor([0]))
    assert value == pytest.approx((2 * (0.5 * 5) ** 2) ** 0.5)
    assert flat.weight.grad is None


P = 1 / (1 + math.e)  # probability of the second class for the logits 1 and 0


def test_plain_and_fisher_of_a_linear_layer():
    # logits are (1, 0), their gradients (-P, P): θ · g = -P; of the outputs a · g = (-P, 0)
    network, batch = linear([1.0], [0.0]), (torch.ones(1, 1), torch.tensor([0]))
    assert plain(network, *batch) == pytest.approx(-P)
    assert fisher(network, *batch) == pytest.approx(P**2 / 2)
    assert network.weight.grad is None


def test_grasp_of_a_linear_layer():
    # the gradient is (-P, P), the Hessian P (1 - P) (1, -1; -1, 1): H g = 2 P² (1 - P) (-1, 1)
    network, batch = linear([1.0], [0.0]), (torch.ones(1, 1), torch.tensor([0]))
    assert grasp(network, *batch) == pytest.approx(2 * P**2 * (1 - P))


def test_grasp_is_the_change_of_the_gradients_norm():
    """Half the derivative of ‖∂L/∂θ‖² towards weights of 0, by finite differences."""
    torch.manual_seed(0)
    network = nn.Sequential(linear(*torch.randn(4, 3).tolist()), nn.Softplus())
    network = network.append(linear(*torch.randn(2, 4).tolist())).double()
    images, labels = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2

    def norm(factor):
        with torch.no_grad():
            scaled = {name: factor * p for name, p in network.named_parameters()}
        scaled = {name: p.requires_grad_() for name, p in scaled.items()}
        loss = cross_entropy(functional_call(network, scaled, (images,)), labels)
        gradients = torch.autograd.grad(loss, list(scaled.values()))
        return float(sum(g.square().sum() for g in gradients))

    expected = (norm(1 - 1e-5) - norm(1 + 1e-5)) / 2e-5 / 2
    assert grasp(network, images, labels) == pytest.approx(expected, rel=1e-6)


def test_epe_of_gradients_in_opposite_directions():
    # correlation -1/2 between the two examples, as for jacov
    network = nn.Sequential(nn.ReLU(), linear([1.0, 1.0, 1.0]))
    images = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, 1.0]])
    own, other = math.log(1 + 1e-5), math.log(0.5 + 1e-5)
    assert epe(network, images, torch.tensor([4, 4])) == pytest.approx(abs(2 * own + 2 * other))
    assert epe(network, images, torch.tensor([4, 7])) == pytest.approx(2 * own)
    assert epe(nn.Sequential(nn.ReLU()), -images.abs(), torch.zeros(2)) == -math.inf
    # class 0 has both, and a hundred classes one each: mean over classes of the differences of pairs
    many = torch.cat([images, images[:1].expand(100, 3)])
    labels = torch.cat([torch.zeros(2), torch.arange(1, 101)])
    difference = abs((own + other) - own)
    assert epe(network, many, labels) == pytest.approx(2 * 100 * difference / 101, rel=1e-4)


def zen_of(*layers, channels=1):
    """Score of layers before a pool, and the draws of x, ε and the first layer's weights."""
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))
    images, generator = torch.zeros(64, 1, 6, 6), torch_generator(0, "zen")
    weights = torch.randn(layers[0].weight.shape, generator=generator)
    torch.randn(2, channels, generator=generator)
    x, noise = (torch.randn(images.shape, generator=generator) for _ in range(2))
    length = float(noise.flatten(1).norm(dim=1).mean())
    return zen(network, images, torch.zeros(64)), weights, x, length


def test_zen_of_a_linear_layer_with_and_without_norms():
    """A norm divides the features by what its spread multiplies the score with."""
    convolution = lambda channels: nn.Conv2d(1, channels, 1, bias=False)
    value, weights, _, length = zen_of(convolution(1))
    expected = math.log(0.01 * float(weights.abs()) * length)
    assert value == pytest.approx(expected, abs=1e-4)
    value, *_ = zen_of(convolution(1), nn.BatchNorm2d(1))
    assert value == pytest.approx(expected, abs=0.01)
    value, weights, _, length = zen_of(convolution(2), nn.BatchNorm2d(2), channels=2)
    # both channels have unit variance, and the spread is that of the mean variance of both
    expected = math.log(0.01 * float(weights.norm()) * length)
    assert value == pytest.approx(expected, abs=0.01)


def test_zen_leaves_out_what_does_not_run():
    convolution = nn.Conv2d(1, 1, 1, bias=False)
    convolution.unused = nn.Sequential(nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(1))
    value, weights, _, length = zen_of(convolution)
    assert value == pytest.approx(math.log(0.01 * float(weights.abs()) * length), abs=1e-4)


def test_fisher_sums_over_pixels_before_it_squares():
    # the convolution's outputs are (1, 1), and the mean halves them: logits (1, 0), Σ a · g = -P;
    # of the layer after it as above
    convolution = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(convolution.weight)
    network = nn.Sequential(
        convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear([1.0], [0.0])
    )
    assert fisher(network, torch.ones(1, 1, 1, 2), torch.tensor([0])) == pytest.approx(P**2)


def test_fisher_of_tokens_is_that_of_a_convolution_of_one_pixel():
    torch.manual_seed(0)
    tokens, head, labels = nn.Linear(3, 4), nn.Linear(4, 2), torch.arange(5) % 2
    pixels = nn.Conv2d(3, 4, 1)
    pixels.load_state_dict({"weight": tokens.weight[:, :, None, None], "bias": tokens.bias})
    mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    over_tokens = nn.Sequential(tokens, nn.Unflatten(1, (7, 1)), Channels(), mean)
    images = torch.randn(5, 7, 3)
    expected = fisher(nn.Sequential(pixels, mean), images.transpose(1, 2)[..., None], labels)
    assert fisher(over_tokens, images, labels) == pytest.approx(expected)


class Channels(nn.Module):
    """(B, height, width, channels) to (B, channels, height, width)."""

    def forward(self, x):
        return x.movedim(-1, 1)


class Chain(nn.Module):
    """Three layers to choose from, of weights 6, 3 and 0, for images of one pixel."""

    def __init__(self, num_classes, in_channels):
        super().__init__()
        make = lambda weight: lambda: linear(*[[weight]] * num_classes)
        self.pick = LayerChoice({name: make(float(name)) for name in "630"}, label="pick")

    def forward(self, x):
        return self.pick(x.flatten(1))


def searched(**options):
    given = {"image_size": 1, "in_channels": 1, "num_classes": 2, "seed": 0, **options}
    return Supernet(LayerSpace(Chain), **given)


def test_a_zero_cost_start_is_what_the_mixture_loses_without_an_operation():
    """Of 2 outputs without the first: R = 2 · (3 + 0) / 3, and synflow is log(1 + R)."""
    scores = -torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64).log1p()
    expected = 0.5 * (scores - scores.mean()) / scores.std(correction=0)
    found = searched(alpha_start=ZeroCostStart(scale=0.5))
    random = searched().alpha.detach()  # of the usual start, which is added
    assert (found.alpha.detach() - random)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert str(found.started_from) == str(found.architecture) == "pick=6"


def test_a_zero_cost_start_is_a_function_of_the_seed():
    def alpha(of_process):
        torch.manual_seed(of_process)
        start = ZeroCostStart("naswot")
        options = {"num_classes": 4, "channels": 4, "cells": 1, "image_size": 8}
        net = Supernet(NASBench201(), alpha_start=start, seed=3, **options)
        return net.alpha.detach(), float(torch.rand(()))

    (first, one), (second, other) = alpha(0), alpha(1)
    assert torch.equal(first, second)
    assert one != other
    assert first.std(1, correction=0).tolist() == pytest.approx([1.0] * 6, abs=0.01)


def test_starts_that_make_no_sense():
    with pytest.raises(ConfigurationError, match="alpha_start: proxy must be one of synflow, "):
        ZeroCostStart("sinflow")
    with pytest.raises(ConfigurationError, match="alpha_start: scale must be above 0"):
        ZeroCostStart(scale=0.0)
    with pytest.raises(
        ConfigurationError, match="alpha_start: l2_norm of the mixture is not finite, or the same"
    ):
        searched(alpha_start=ZeroCostStart("l2_norm"))
    with pytest.raises(ConfigurationError, match=r"model\.alpha_start sets alpha, and"):
        searched(alpha_start=ZeroCostStart(), alpha_held=True)


def test_a_mean_rank_is_that_of_a_sort():
    space = NASBench201()
    size = lambda cell: float(sum(cell.choices))
    first = lambda cell: float(cell.choices[0])
    score = MeanRank([size, first], space, num_others=50, seed=1)
    generator = torch_generator(1, "mean rank")
    others = list(dict.fromkeys(space.sample(generator) for _ in range(200)))[:50]
    for cell in others[:10]:
        ranks = [sum(f(one) < f(cell) for one in others) / 50 for f in (size, first)]
        assert score(cell) == pytest.approx(sum(ranks) / 2)


def test_naswot_counts_activations_that_agree():
    # signs of x: (+, -) and (+, +): one of two units agrees; K = (2, 1; 1, 2), det 3
    images = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert naswot(nn.Sequential(nn.ReLU()), images, torch.zeros(2)) == pytest.approx(math.log(3))
    same = torch.ones(2, 2)
    assert naswot(nn.Sequential(nn.ReLU(inplace=True)), same, torch.zeros(2)) == -math.inf


@pytest.mark.parametrize("name", ["naswot", "jacov", "epe", "zen", "snip", "grad_norm"])
def test_a_single_image_is_refused_where_it_tells_nothing(name):
    network = nn.Sequential(linear([1.0, 2.0]), nn.BatchNorm1d(1), nn.ReLU())
    with pytest.raises(
        ConfigurationError, match=f"score {name} needs a batch of at least 2 images"
    ):
        PROXIES[name](network, torch.ones(1, 2), torch.zeros(1).long())


def test_jacov_of_gradients_in_opposite_directions():
    # gradients w · [x > 0] of two examples: (1, 0, 0) and (0, 0, 1): correlation -1/2
    network = nn.Sequential(nn.ReLU(), linear([1.0, 1.0, 1.0]))
    images = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, 1.0]])
    values = np.array([0.5, 1.5]) + 1e-5
    assert jacov(network, images, torch.zeros(2)) == pytest.approx(
        -np.sum(np.log(values) + 1 / values)
    )
    assert jacov(nn.Sequential(nn.ReLU()), -images.abs(), torch.zeros(2)) == -math.inf


SPACES = ["small_mobilenet", "small_resnet", "small_vit"]


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_leaves_the_network_as_it_was_and_repeats_itself(name):
    space = NASBench201()
    shape = {"num_classes": 3, "channels": 4, "cells": 1}
    network = space.build(space.architecture([3, 1, 2, 3, 4, 3]), **shape).eval()
    batch = noise_batch(6, Networks(space, 8, {"in_channels": 3, **shape}), 0)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    first = PROXIES[name](network, *batch)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    assert not network.training
    assert PROXIES[name](network, *batch) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert math.isfinite(first)


@pytest.mark.parametrize(
    ("name", "space"),
    [
        *((name, SPACES[place % 3]) for place, name in enumerate(PROXIES) if name != "grasp"),
        *(("grasp", space) for space in SPACES),
    ],
)
def test_every_proxy_scores_networks_of_sizes(name, space):
    made, side = NAMES[space](), 32 if space == "small_vit" else 16
    networks = Networks(made, side, {"num_classes": 10, "in_channels": 3})
    score = ProxyScore(name, networks, [noise_batch(4, networks, 0)])
    if name == "grasp" and space != "small_resnet":
        with pytest.raises(ConfigurationError, match="grasp needs second derivatives"):
            score(made.smallest)
        return
    value = score(made.smallest)
    assert math.isfinite(value)
    assert score(made.smallest) == value


@pytest.mark.parametrize("name", ["plain", "fisher"])
def test_a_pooled_score_is_that_of_all_examples_in_one_batch(name):
    """Clients of 2, 3 and 7 images; a transformer has no batch norm."""
    sizes = {"features": (8,), "heads": (2,), "ratios": (1.0,), "depths": (1,), "head_features": 4}
    space = ViT(image_side=8, patch=4, **sizes)
    networks = Networks(space, 8, {"in_channels": 3, "num_classes": 4})
    images, labels = noise_batch(12, networks, 0)
    clients = list(zip(images.split([2, 3, 7]), labels.split([2, 3, 7]), strict=True))
    whole = ProxyScore(name, networks, [(images, labels)])(space.largest)
    assert ProxyScore(name, networks, clients)(space.largest) == pytest.approx(whole, rel=1e-4)


def test_over_iid_clients_a_pooled_score_ranks_as_one_batch_does():
    """Batch norms see a client's images alone."""
    space = NASBench201()
    shape = {"in_channels": 3, "num_classes": 10, "channels": 4, "cells": 1}
    networks = Networks(space, 8, shape)
    images, labels = noise_batch(64, networks, 0)
    clients = list(zip(images.split(16), labels.split(16), strict=True))
    generator = torch.Generator().manual_seed(0)
    cells = [space.sample(generator) for _ in range(12)]
    scores = [ProxyScore("fisher", networks, batches) for batches in (clients, [(images, labels)])]
    found, expected = ([score(cell) for cell in cells] for score in scores)
    assert rank_correlation(found, expected) > 0.9


@pytest.mark.parametrize("name", ["snip", "grad_norm", "grasp", "naswot", "jacov", "epe"])
def test_scores_that_do_not_add_up_are_of_one_client(name):
    networks = Networks(NASBench201(), 8, {"in_channels": 3, "num_classes": 10})
    batch = noise_batch(2, networks, 0)
    with pytest.raises(ConfigurationError, match=f"score {name} cannot be pooled over"):
        ProxyScore(name, networks, [batch, batch])


@pytest.mark.parametrize("in_channels", [1, 3])
def test_a_batch_of_a_folder_has_its_images_in_one_scale(tmp_path, in_channels):
    write_folder(tmp_path, "images", ["a", "b"], 3, size=(8, 8))
    shape = {"in_channels": in_channels, "num_classes": 2}
    networks = Networks(NASBench201(), 6, shape)
    [(images, labels)] = folder_batches([tmp_path / "images"], 4, networks, 0)
    assert images.shape == (4, in_channels, 6, 6)
    assert set(labels.tolist()) == {0, 1}
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-5)
    one_class = Networks(NASBench201(), 6, {**shape, "num_classes": 1})
    with pytest.raises(ConfigurationError, match="2 classes, and num_classes is 1"):
        folder_batches([tmp_path / "images"], 4, one_class, 0)


def test_folders_of_clients_share_their_classes(tmp_path):
    write_folder(tmp_path, "first", ["cat", "dog"], 2, size=(8, 8))
    write_folder(tmp_path, "second", ["dog", "horse"], 2, size=(8, 8))
    networks = Networks(NASBench201(), 8, {"in_channels": 3, "num_classes": 3})
    folders = [tmp_path / name for name in ("first", "second")]
    batches = folder_batches(folders, 4, networks, 0)
    assert [sorted(labels.tolist()) for _, labels in batches] == [[0, 0, 1, 1], [1, 1, 2, 2]]


def test_grey_images_are_the_luminance(tmp_path):
    write_folder(tmp_path, "images", ["a", "b"], 3, size=(8, 8))
    grey, color = (
        folder_batches(
            [tmp_path / "images"],
            6,
            Networks(NASBench201(), 8, {"in_channels": channels, "num_classes": 2}),
            0,
        )[0][0]
        for channels in (1, 3)
    )
    luminance = 0.299 * color[:, 0] + 0.587 * color[:, 1] + 0.114 * color[:, 2]
    expected = (luminance - luminance.mean()) / luminance.std()
    assert torch.allclose(grey[:, 0], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not TABLE.exists(), reason="needs the benchmark's table")
def test_proxies_rank_cells_as_training_does():
    from scipy.stats import spearmanr

    space, table = NASBench201(), NASBench201Table.read(TABLE)
    generator = torch.Generator().manual_seed(0)
    cells = [space.sample(generator) for _ in range(60)]
    truth = [table.lookup(cell)["cifar10"] for cell in cells]
    networks = Networks(space, 16, {"num_classes": 10, "in_channels": 3, "cells": 1})
    batch = noise_batch(32, networks, 0)
    scores = {name: ProxyScore(name, networks, [batch]) for name in ("synflow", "naswot")}
    for score in (*scores.values(), benchmark_flops, benchmark_params):
        assert spearmanr([score(cell) for cell in cells], truth).statistic > 0.4
