"""NAS-Bench-201: strings, classes of equal cells, the graph of a cell, derivation."""

import pytest
import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.nas_bench_201 import EDGES, NASBench201, NASBench201Cell

SPACE = NASBench201()
FIRST = "|avg_pool_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|nor_conv_1x1~0|skip_connect~1|skip_connect~2|"


class Scaled(nn.Module):
    """An edge that multiplies by a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight


def test_all_strings_round_trip_and_tell_cells_apart():
    cells = list(SPACE.enumerate())
    assert len(cells) == SPACE.size == 5**6
    assert [decision.name for decision in SPACE.decisions][:3] == ["0→1", "0→2", "1→2"]
    assert len({str(cell) for cell in cells}) == len(cells)
    assert all(SPACE.parse(str(cell)) == cell for cell in cells)


def test_there_are_6466_classes_of_equal_cells():
    assert len({SPACE.canonical(cell) for cell in SPACE.enumerate()}) == 6466


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (FIRST, "(0)@avg_pool_3x3+(0)@avg_pool_3x3+(0)@nor_conv_1x1+(0)@nor_conv_1x1"),
        ("|avg_pool_3x3~0|+|skip_connect~0|none~1|+|none~0|none~1|skip_connect~2|", "#+#+#+0"),
        ("|none~0|+|none~0|none~1|+|none~0|none~1|none~2|", "#+#+#"),
    ],
)
def test_canonical_strings_are_the_benchmarks(text, canonical):
    assert SPACE.canonical(SPACE.parse(text)) == canonical


def test_the_number_of_an_operation_is_its_place_in_the_string():
    cell = SPACE.parse(FIRST)
    named = dict(zip((str(row) for row in SPACE.rows), cell.options, strict=True))
    assert named == {
        "0→1": "avg_pool_3x3",
        "0→2": "nor_conv_1x1",
        "1→2": "skip_connect",
        "0→3": "nor_conv_1x1",
        "1→3": "skip_connect",
        "2→3": "skip_connect",
    }
    assert SPACE.operations_of(cell) == cell.choices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it ends there; expected '|'"),
        ("nor_conv_3x3", "character 1 is 'nor_conv_3x3'; expected '|'"),
        (FIRST.replace("nor_conv_1x1~0|skip", "conv~0|skip", 1), "character 19 is 'conv'"),
        (FIRST.replace("~1", "~0", 1), "'~'; expected '~1|+|'"),
        (FIRST[:-1], "character 93 is '~'; expected '~2|'"),
        (FIRST + "+", "expected its end"),
        (
            "|none~0|+|none~0|",
            "it ends there; expected the option of 1→2: none, skip_connect, nor_",
        ),
    ],
)
def test_what_is_no_cell_is_refused_with_the_place(text, said):
    with pytest.raises(ConfigurationError) as refused:
        SPACE.parse(text)
    assert said in str(refused.value)


def test_a_cell_sums_the_products_along_its_paths():
    w = torch.rand(6, 5, dtype=torch.float64)
    cell = NASBench201Cell(lambda row, *_: Scaled(w[row, 0]), 1, ())
    weight = dict(zip(EDGES, w[:, 0].tolist(), strict=True))
    expected = (
        weight[0, 3]
        + weight[0, 1] * weight[1, 3]
        + weight[0, 2] * weight[2, 3]
        + weight[0, 1] * weight[1, 2] * weight[2, 3]
    )
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert cell(x).item() == pytest.approx(expected, rel=1e-12)


def test_edges_that_are_left_out_are_zeros():
    nothing = SPACE.build(SPACE.architecture([0] * 6), num_classes=3, channels=2, cells=1).eval()
    out = nothing(torch.randn(2, 3, 8, 8))
    assert torch.equal(out[0], out[1])  # no image reaches the classifier
    skip = SPACE.architecture([1, 0, 0, 0, 1, 0])  # input to 1 to output
    cell = SPACE.build(skip, num_classes=3, channels=2, cells=1).cells[0]
    x = torch.randn(2, 2, 4, 4)
    assert torch.equal(cell(x), x)


@pytest.mark.parametrize("side", [7, 8, 9, 30])
def test_networks_take_images_of_any_side(side):
    cell = SPACE.sample(torch.Generator().manual_seed(side))
    network = SPACE.build(cell, num_classes=4, in_channels=1, channels=2, cells=1)
    assert network(torch.randn(2, 1, side, side)).shape == (2, 4)


def test_derivation_takes_the_best_operation_and_none_among_them():
    alpha = torch.zeros(6, 5)
    best = (0, 3, 1, 4, 2, 0)
    alpha[range(6), best] = 1.0
    assert SPACE.derive(alpha).choices == best
    assert SPACE.derive(alpha, torch.randn(6)).choices == best  # β has no say


def test_parameters_that_mean_no_cell_are_refused():
    with pytest.raises(ValueError, match=r"alpha of nas_bench_201 must have the shape \(6, 5\)"):
        SPACE.derive(torch.zeros(5, 6))
    with pytest.raises(ValueError, match=r"beta of nas_bench_201 must have the shape \(6,\)"):
        SPACE.derive(torch.zeros(6, 5), torch.zeros(5))
    with pytest.raises(ValueError, match="not finite"):
        SPACE.derive(torch.full((6, 5), torch.nan))


def test_edges_that_enter_a_node_share_one():
    beta = torch.randn(6, dtype=torch.float64)
    shares = SPACE.edge_shares(beta)
    assert SPACE.incoming == ((0,), (1, 2), (3, 4, 5))
    assert shares[0] == 1
    assert float(shares[1:3].sum()) == pytest.approx(1.0)
    assert torch.allclose(shares[3:], beta[3:].softmax(0))


def test_search_networks_do_not_scale_inside_the_cells():
    def norms(affine):
        network = SPACE.network(
            lambda row, ops, *sizes: ops[3](*sizes), num_classes=2, channels=2, affine=affine
        )
        return [
            module.affine
            for cell in network.cells
            if isinstance(cell, NASBench201Cell)
            for module in cell.modules()
            if isinstance(module, nn.BatchNorm2d)
        ]

    assert len(norms(True)) == 90
    assert all(norms(True))
    assert not any(norms(False))
