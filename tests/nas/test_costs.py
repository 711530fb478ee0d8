"""Costs of cells: tables against networks that are built, closed forms, published figures."""

import ast
import json
from itertools import product

import pytest
import torch
from nas_bench_201_costs import benchmark_flops, benchmark_params, naslib_flops
from readme import ROOT
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import MEASURES, Cost, count
from fl_lightning.nas.spaces.cells import cost_table
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.nas_bench_201 import EDGES, NASBench201
from fl_lightning.nas.spaces.space import Decision, Networks, SearchSpace

SPACE = NASBench201()
SHAPE = {"in_channels": 3, "num_classes": 10}
NASLIB = ROOT.parent / "shared" / "data" / "nasbench201_flops_params_725.json"


def cells(count, space=SPACE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [space.sample(generator) for _ in range(count)]


def hooked(network, image):
    """A plain counter of our own: hooks on convolutions and linear layers."""
    flops = 0

    def on_layer(layer, inputs, output):
        nonlocal flops
        taps = layer.weight[0].numel()  # multiply-adds for one output
        flops += output.numel() * (taps + (layer.bias is not None))

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(on_layer)
    with torch.no_grad():
        network.eval()(image)
    return flops, sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("number", range(6))
def test_costs_are_those_of_a_network_that_is_built(number):
    cell = cells(6)[number]
    classes, side = [(10, 32), (100, 32), (120, 16)][number % 3]
    network = SPACE.build(cell, num_classes=classes)
    expected = hooked(network, torch.zeros(1, 3, side, side))
    ours = SPACE.cost(cell, side=side, num_classes=classes)
    assert (ours.flops, ours.params) == expected
    assert ours == count(network, torch.zeros(1, 3, side, side))
    closed = benchmark_flops(cell, side=side, num_classes=classes)
    assert (closed, benchmark_params(cell, num_classes=classes)) == expected


@pytest.mark.parametrize(
    "shape",
    [
        {"channels": 4, "cells": 1, "side": 8, "in_channels": 1, "num_classes": 10},
        {"channels": 6, "cells": 2, "side": 15, "in_channels": 2, "num_classes": 3},
    ],
)
@pytest.mark.parametrize("space", [SPACE, DARTS()], ids=lambda space: space.name)
def test_costs_of_small_networks_are_those_of_what_is_built(space, shape):
    build = {name: value for name, value in shape.items() if name != "side"}
    image = torch.zeros(1, shape["in_channels"], shape["side"], shape["side"])
    for architecture in cells(4, space):
        network = space.build(architecture, **build)
        ours = space.cost(architecture, **shape)
        assert (ours.flops, ours.params) == hooked(network, image)
        assert ours == count(space.build(architecture, **build), image)


def test_extremes_and_the_28_distinct_pairs():
    costs = [SPACE.cost(cell) for cell in SPACE.enumerate()]
    pairs = {(one.flops, one.params) for one in costs}
    assert len(pairs) == 28
    assert min(pairs) == (7_783_050, 73_306)
    assert max(pairs) == (220_119_690, 1_531_546)


def test_the_published_figures_of_the_benchmarks_first_cell():
    cell = SPACE.parse(
        "|avg_pool_3x3~0|+|nor_conv_1x1~0|skip_connect~1|"
        "+|nor_conv_1x1~0|skip_connect~1|skip_connect~2|"
    )
    ours = SPACE.cost(cell)
    assert (ours.flops, ours.params) == (15_647_370, 129_306)


def test_published_networks_of_darts_cost_what_the_count_of_the_built_one_says():
    space = DARTS()
    architecture = cells(1, space)[0]
    with torch.device("meta"):
        network = space.build(architecture, num_classes=10)
        expected = count(network, torch.empty(1, 3, 32, 32))
    assert space.cost(architecture) == expected


def test_expected_costs_are_the_mean_over_draws():
    networks = Networks(SPACE, 8, {**SHAPE, "channels": 2, "cells": 1})
    table = cost_table(networks)
    pairs = [(0, 3), (1, 2), (2, 4), (0, 1), (3, 4), (1, 3)]  # of operations, one an edge
    probabilities = torch.zeros(6, 5, dtype=torch.float64)
    for row, pair in enumerate(pairs):
        probabilities[row, list(pair)] = torch.rand(2, dtype=torch.float64).softmax(0)
    probabilities.requires_grad_()
    total = torch.zeros(3, dtype=torch.float64)
    for cell in map(SPACE.architecture, product(*pairs)):
        chance = probabilities.detach()[range(6), list(cell.choices)].prod()
        one = networks.cost(cell)
        total += chance * torch.tensor([one.flops, one.params, one.activations])
    expected = torch.stack([table[measure].expected(probabilities) for measure in MEASURES])
    assert torch.allclose(expected.detach(), total, rtol=1e-12)
    expected[0].backward()
    assert torch.equal(probabilities.grad, table["flops"].of_rows.double())


def test_a_table_is_counted_once_and_without_random_draws():
    random = torch.get_rng_state()
    table = cost_table(Networks(SPACE, 12, SHAPE))
    assert cost_table(Networks(SPACE, 12, dict(SHAPE))) is table
    assert torch.equal(torch.get_rng_state(), random)
    assert table["flops"].of_rows.device.type == "cpu"


def test_what_has_no_cost_is_refused():
    with pytest.raises(
        ConfigurationError,
        match=r"nas_bench_201 cannot use an architecture of another space \(darts\)",
    ):
        SPACE.cost(cells(1, DARTS())[0])
    with pytest.raises(ConfigurationError, match="side must be at least 1, got 0"):
        SPACE.cost(cells(1)[0], side=0)


def test_other_spaces_are_built_and_counted():
    class Widths(SearchSpace):
        name = "widths"
        decisions = (Decision("width", ("1", "2")),)

        def build(self, architecture, *, num_classes, in_channels):
            return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, num_classes))

    space = Widths()
    built = space.cost(space.architecture([0]), side=4, num_classes=5, in_channels=2)
    assert built == Cost(32 * 5 + 5, 32 * 5 + 5, 5)


@pytest.mark.slow
@pytest.mark.skipif(not NASLIB.exists(), reason="NASLib's table is not there")
def test_all_entries_of_naslibs_table():
    """725 + 725 + 724 cells; NASLib has other orders of operations and of edges."""
    operations = ("skip_connect", "none", "nor_conv_3x3", "nor_conv_1x1", "avg_pool_3x3")
    edges = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    sets = {"cifar10": (32, 10), "cifar100": (32, 100), "ImageNet16-120": (16, 120)}
    entries = json.loads(NASLIB.read_text())
    compared = 0
    for name, (side, classes) in sets.items():
        for key, entry in entries[name].items():
            named = dict(zip(edges, (operations[o] for o in ast.literal_eval(key)), strict=True))
            cell = SPACE.architecture([SPACE.operations.index(named[edge]) for edge in EDGES])
            flops = naslib_flops(cell, side=side, num_classes=classes)
            assert flops == round(1e6 * entry["flops"]["score"])
            params = SPACE.cost(cell, side=side, num_classes=classes).params
            assert params == round(1e6 * entry["params"]["score"])
            compared += 1
    assert compared == 2174
