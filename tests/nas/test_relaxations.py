"""Mixed edges and drawn edges: the published vectors, and what is left when a rule is off."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relaxation import (
    EdgeWeights,
    MixedEdge,
    PartialChannels,
    SearchStep,
    SinglePath,
    Softmax,
    drawn_operations,
    gumbel_noise,
    straight_through,
    weights_of,
)
from fl_lightning.nas.sampled_paths import (
    BinaryGates,
    HardGumbel,
    SoftGumbel,
    gate_weights,
    gumbel_softmax,
    hard_gumbel_weights,
    shifted,
)
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201

ALPHA, NOISE = (0.5, -0.2, 0.1), (0.3, 1.2, -0.4)
RULES = [
    Softmax(),
    HardGumbel(),
    HardGumbel(others="all"),
    HardGumbel(others="none"),
    SoftGumbel(),
    PartialChannels(part=1, edge_weights=False),
    BinaryGates(),
    BinaryGates(paths="all"),
    SinglePath(),
]


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, x):
        self.calls += 1
        return self.factor * x


def row(numbers, **options):
    return torch.tensor([numbers], dtype=torch.float64, **options)


def close(actual, expected):
    torch.testing.assert_close(
        actual.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6
    )


def seeded(seed=0, **options):
    return SearchStep(generator=torch.Generator().manual_seed(seed), **options)


def factors(*numbers):
    return [lambda *_, number=number: Times(number) for number in numbers]


@pytest.mark.parametrize(
    ("temperature", "p", "gradient"),
    [
        (1.0, (0.391501, 0.478180, 0.130319), (-0.289248, 0.124892, 0.164356)),
        (0.5, (0.384227, 0.573199, 0.042574), (-0.505909, 0.391671, 0.114238)),
    ],
)
def test_one_operation_runs_and_all_of_alpha_learns(temperature, p, gradient):
    alpha = row(ALPHA, requires_grad=True)
    close(gumbel_softmax(alpha, row(NOISE), temperature)[0], p)
    h = hard_gumbel_weights(alpha, row(NOISE), temperature, "all").operations
    assert h.tolist() == [[0, 1, 0]]
    (h[0] * torch.tensor([1.0, 2, 3])).sum().backward()
    close(alpha.grad[0], gradient)


@pytest.mark.parametrize(
    ("others", "gradient", "calls"),
    [
        ("all", (-0.114896, 0.218301, -0.103405), [1, 1, 1]),
        ("bare", (-0.140406, 0.187143, -0.046737), [0, 1, 0]),
        ("none", (-0.046802, 0.062381, -0.015579), [0, 1, 0]),
    ],
)
def test_what_multiplies_operations_that_were_not_selected(others, gradient, calls):
    alpha = row(ALPHA, requires_grad=True)
    edge = MixedEdge(0, [Times(1.0), Times(-0.5), Times(2.0)])
    weights = hard_gumbel_weights(alpha, row(NOISE), 1.0, others)
    y = edge(torch.ones((), dtype=torch.float64), weights)
    assert y == -0.5
    (y**2 / 2).backward()
    close(alpha.grad[0], gradient)
    assert [operation.calls for operation in edge.operations] == calls


def test_the_bare_rule_is_the_default_and_adds_to_every_number_of_an_image():
    assert HardGumbel().weights(torch.zeros(2, 3), seeded(3)).bare
    alpha = row(ALPHA, requires_grad=True)
    weights = hard_gumbel_weights(alpha, row(NOISE), 1.0, "bare")
    weights.operations.retain_grad()
    MixedEdge(0, [Times(1.0), Times(-0.5), Times(2.0)])(torch.ones(2, 3), weights).sum().backward()
    close(weights.operations.grad[0], (6.0, -3.0, 6.0))


@pytest.mark.parametrize("temperature", [10.0, 1.0, 0.1])
def test_one_hot_to_the_last_bit_in_ten_thousand_draws(temperature):
    generator = torch.Generator().manual_seed(0)
    alpha = torch.randn(10_000, 5, generator=generator)
    weights = hard_gumbel_weights(alpha, gumbel_noise(alpha, generator), temperature, "bare")
    ordered = weights.operations.sort(1).values
    assert torch.equal(ordered, torch.tensor([0.0, 0, 0, 0, 1]).expand(10_000, 5))


def test_straight_through_needs_no_luck_with_rounding():
    soft = torch.rand(10_000, 5) * 1e4
    hard = torch.zeros(10_000, 5).index_fill(1, torch.tensor([2]), 1)
    assert torch.equal(straight_through(hard, soft), hard)


def test_draws_follow_the_softmax():
    alpha = torch.tensor([[1.0, 0.0, -1.0]]).expand(200_000, 3)
    weights = HardGumbel(others="all").weights(alpha, seeded())
    expected = alpha[0].softmax(0)
    torch.testing.assert_close(weights.operations.mean(0), expected, rtol=0, atol=0.005)


def test_two_paths_are_drawn_without_replacement():
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    drawn = drawn_operations(p.log().expand(200_000, 3), 2, torch.Generator().manual_seed(0))
    first, second = ((drawn == k).double().mean(0) for k in (0, 1))
    torch.testing.assert_close(first[0], p[0], rtol=0, atol=0.005)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    after_first = (0.6 * 0.3 / 0.4) + (0.1 * 0.3 / 0.9)  # P(second is operation 1)
    torch.testing.assert_close(float(second[1]), after_first, rtol=0, atol=0.005)


def test_temperatures_over_a_search():
    gdas, fbnet = HardGumbel(), SoftGumbel(num_epochs=90)
    assert [gdas.temperature(p) for p in (0, 1)] == [10, 0.1]
    assert gdas.temperature(0.5) == pytest.approx(5.05)
    assert [fbnet.temperature(e / 90) for e in (0, 1, 90)] == pytest.approx(
        [5, 5 * 0.956, 5 * 0.956**90]
    )


def test_soft_weights_become_hard_ones_as_the_temperature_falls():
    alpha, noise = row(ALPHA), row(NOISE)
    hard = hard_gumbel_weights(alpha, noise, 1e-5, "all").operations
    assert torch.equal(gumbel_softmax(alpha, noise, 1e-5), hard)
    flat = gumbel_softmax(alpha, noise, 1e9)
    torch.testing.assert_close(flat, torch.full_like(flat, 1 / 3))

    late, early = (
        SoftGumbel().weights(torch.zeros(20, 3), seeded(progress=p)).operations for p in (1.0, 0.0)
    )
    assert (late.max(1).values > early.max(1).values).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_candidate_is_itself_and_the_same_seed_draws_the_same_in_both_precisions(rule):
    operation = nn.Conv2d(4, 4, 3, padding=1)
    edge, x = rule.edge(0, [lambda *_: operation], 4, 4, 1), torch.randn(2, 4, 5, 5)
    for moves_alpha in (True, False):
        weights = rule.weights(torch.tensor([[0.7]]), seeded(moves_alpha=moves_alpha))
        assert torch.equal(edge(x, weights), operation(x))
    alpha = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    first, second = (
        rule.weights(alpha.to(dtype), seeded(4)) for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(first.operations.double(), second.operations, rtol=0, atol=1e-6)
    assert first.running == second.running


def test_partial_channels_of_one_node():
    alpha = torch.tensor([[0.2, -0.1, 0.5], [0.4, 0.3, -0.6]], dtype=torch.float64)
    beta = torch.tensor([0.3, -0.1], dtype=torch.float64, requires_grad=True)
    rule = PartialChannels(part=1)
    weights = replace(rule.weights(alpha, SearchStep()), edges=beta.softmax(0))
    close(weights.edges, (0.598688, 0.401312))
    products = weights.edges[:, None] * weights.operations
    close(products[0], (0.193708, 0.143502, 0.261478))
    close(products[1], (0.176578, 0.159775, 0.064960))
    x = torch.ones(1, 1, dtype=torch.float64)
    outputs = [factors(1, 2, 3), factors(0, 1, -1)]
    node = sum(rule.edge(r, outputs[r], 1, 1, 1)(x, weights) for r in (0, 1))
    close(node[0, 0], 1.359961)
    node.sum().backward()
    close(beta.grad, (0.450954, -0.450954))


def test_all_channels_are_darts_and_with_equal_edge_weights_darts_scaled():
    alpha, x = torch.randn(2, 2), torch.randn(2, 4, 6, 6)

    def output(rule, shares=None):
        weights = replace(rule.weights(alpha, SearchStep()), edges=shares)
        return rule.edge(0, factors(1, 3), 4, 4, 1)(x, weights)

    darts = output(Softmax())
    assert torch.equal(output(PartialChannels(part=1, edge_weights=False)), darts)
    assert torch.equal(output(PartialChannels(part=1), torch.zeros(2).softmax(0)), 0.5 * darts)


@pytest.mark.parametrize(("stride", "side"), [(1, 5), (2, 5), (2, 6)])
def test_the_rest_of_the_channels_passes_shuffled(stride, side):
    rule = PartialChannels(part=4, edge_weights=False)

    def candidate(channels_in, channels_out, stride):
        assert (channels_in, channels_out) == (2, 2)
        return nn.Conv2d(2, 2, 3, stride, padding=1)

    edge = rule.edge(0, [candidate], 8, 8, stride)
    x = torch.randn(2, 8, side, side)
    y = edge(x, rule.weights(torch.zeros(1, 1), SearchStep()))
    rest = nn.functional.max_pool2d(x, stride, ceil_mode=True)
    assert torch.equal(y[:, [1, 2, 3, 5, 6, 7]], rest[:, [2, 4, 6, 3, 5, 7]])
    assert torch.equal(y[:, [0, 4]], edge.mixed.operations[0](x[:, :2]))


def test_partial_channels_refuse_what_they_cannot_part():
    rule = PartialChannels(part=4)
    with pytest.raises(ConfigurationError, match="an edge has 6"):
        rule.edge(0, factors(1), 6, 6, 1)
    with pytest.raises(ConfigurationError, match="converts 4 channels to 8"):
        rule.edge(0, factors(1), 4, 8, 1)


def gate_gradient(alpha, weights):
    gates = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64)
    (weights.operations[0] * gates).sum().backward()
    return alpha.grad[0]


def test_gates_over_all_paths():
    alpha = row((0.2, -0.1, 0.4), requires_grad=True)
    close(alpha[0].softmax(0), (0.337585, 0.250089, 0.412327))
    weights = gate_weights(alpha, torch.tensor([[0, 1, 2]]), torch.tensor([[1]]))
    assert weights.operations.tolist() == [[0, 1, 0]]
    close(gate_gradient(alpha, weights), (0.123219, -0.108788, -0.014431))


def test_gates_over_two_paths_and_the_shift_after_the_step():
    alpha = row((0.2, -0.1, 0.4), requires_grad=True)
    weights = gate_weights(alpha, torch.tensor([[2, 0]]), torch.tensor([[2]]))
    assert weights.running == ((0, 2),)
    close(alpha.detach()[0, [0, 2]].softmax(0), (0.450166, 0.549834))
    close(gate_gradient(alpha, weights), (0.099007, 0.0, -0.099007))
    before = alpha.detach()
    after = before - 0.1 * alpha.grad
    moved = BinaryGates().stepped(before, after, weights)
    close((after - moved)[0, 0], 0.001035)
    close(moved[0], (0.189064, -0.1, 0.408865))
    assert moved.softmax(1)[0, 1].item() == pytest.approx(before.softmax(1)[0, 1].item(), abs=1e-15)


@pytest.mark.parametrize(("opened", "learns"), [(2, False), (0, True)])
def test_alpha_does_not_learn_where_none_is_open(opened, learns):
    alpha = row((0.2, -0.1, 0.4), requires_grad=True)
    weights = gate_weights(alpha, torch.tensor([[2, 0]]), torch.tensor([[opened]]), none=2)
    assert weights.operations[0].tolist() == [opened == 0, 0, opened == 2]
    gradient = (weights.operations[0] * torch.tensor([0.5, -0.3, 0.1])).sum()
    assert bool(torch.autograd.grad(gradient, alpha)[0].any()) == learns

    alpha = torch.randn(4, 5)  # a step that moves nothing shifts nothing
    assert torch.equal(shifted(alpha, alpha, torch.rand(4, 5) > 0.5), alpha)


def test_gates_run_one_path_for_weights_and_two_for_alpha_of_which_these_learn():
    alpha = torch.zeros(3, 4, requires_grad=True)
    for moves_alpha, num_paths in ((False, 1), (True, 2)):
        weights = BinaryGates().weights(alpha, seeded(5, moves_alpha=moves_alpha))
        assert [len(numbers) for numbers in weights.running] == [num_paths] * 3
        assert weights.operations.requires_grad == moves_alpha
        assert weights.operations.sum(1).tolist() == [1, 1, 1]
    alpha = torch.randn(6, 5, requires_grad=True)
    weights = BinaryGates().weights(alpha, seeded(2))
    (weights.operations * torch.randn(6, 5)).sum().backward()
    for numbers, gradient in zip(weights.running, alpha.grad, strict=True):
        assert set(gradient.nonzero()[:, 0].tolist()) == set(numbers)


def test_a_single_path_runs_the_given_architecture():
    edge = MixedEdge(1, [Times(2.0), Times(3.0)])
    assert edge(torch.ones(2), weights_of([0, 1], torch.zeros(2, 2))).tolist() == [3, 3]
    assert [operation.calls for operation in edge.operations] == [0, 1]


@pytest.mark.parametrize(
    ("rule", "space"),
    [
        *((rule, NASBench201()) for rule in (*RULES, PartialChannels(part=4))),
        (PartialChannels(part=4), DARTS()),
    ],
    ids=lambda made: type(made).__name__,
)
def test_every_rule_runs_and_teaches_alpha_in_the_networks_of_cells(rule, space):
    network = space.network(rule.edge, num_classes=3, channels=8, cells=1, affine=False)
    alpha = torch.zeros(space.num_rows, len(space.operations), requires_grad=True)
    beta = torch.zeros(space.num_rows, requires_grad=True)
    for seed in range(4):  # a cell that nothing flows through teaches nothing
        shares = space.edge_shares(beta) if rule.has_beta else None
        weights = replace(rule.weights(alpha, seeded(seed)), edges=shares)
        y = network(torch.randn(2, 3, 8, 8), weights)
        assert y.shape == (2, 3)
        (y**2).sum().backward()
    if isinstance(rule, SinglePath):
        assert alpha.grad is None
        return
    assert alpha.grad.isfinite().all()
    assert (alpha.grad != 0).any()
    assert rule.has_beta == (beta.grad is not None)


def test_a_single_path_through_a_search_network_is_the_fixed_network():
    space = NASBench201()
    architecture = space.sample(torch.Generator().manual_seed(8))
    sizes = {"num_classes": 3, "channels": 4, "cells": 1, "affine": True}
    network = space.network(SinglePath().edge, **sizes)
    fixed = space.build(architecture, **sizes)
    choices = space.operations_of(architecture)
    held = {}
    for name, tensor in network.state_dict().items():
        held[name] = tensor
        if ".operations." in name:
            number = int(name.split(".operations.")[1].split(".")[0])
            edges = name.split(".operations.")[0].rsplit(".", 1)[1]
            row = [f"{r.source}_{r.target}" for r in space.rows].index(edges)
            if choices[row] == number:
                held[name.replace(f".operations.{number}.", ".")] = tensor
    fixed.load_state_dict({name: held[name] for name in fixed.state_dict()})
    x = torch.randn(2, 3, 8, 8)
    weights = weights_of(choices, torch.zeros(6, 5))
    torch.testing.assert_close(network(x, weights), fixed(x))


def test_what_an_edge_and_a_rule_need():
    edge = MixedEdge(0, [Times(1.0)])
    with pytest.raises(ValueError, match="call it with edge weights"):
        edge(torch.ones(1))
    with pytest.raises(ValueError, match="1 operations, got 0"):
        edge(torch.ones(1), EdgeWeights(torch.ones(1, 0)))
    with pytest.raises(ValueError, match="generator"):
        HardGumbel().weights(torch.zeros(1, 2), SearchStep())


@pytest.mark.parametrize(
    "make",
    [
        lambda: HardGumbel(last_temperature=0.0),
        lambda: HardGumbel(first_temperature=math.nan),
        lambda: HardGumbel(others="some"),
        lambda: SoftGumbel(decay=0.0),
        lambda: SoftGumbel(num_epochs=0),
        lambda: SoftGumbel(alpha_from=2.0),
        lambda: PartialChannels(part=0),
        lambda: PartialChannels(alpha_from=-1.0),
        lambda: BinaryGates(paths="three"),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()
