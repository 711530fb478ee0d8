"""The space of DARTS: genotypes, published networks, derivation, the shape of a network."""

import pytest
import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import FactorizedReduce
from fl_lightning.nas.spaces.darts import DARTS, DARTSCell

SPACE = DARTS()
DARTS_V1 = """Genotype(
    normal=[('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('skip_connect', 0), ('sep_conv_3x3', 1),
            ('skip_connect', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('skip_connect', 2)],
    normal_concat=[2, 3, 4, 5],
    reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 0),
            ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), ('avg_pool_3x3', 0)],
    reduce_concat=[2, 3, 4, 5])"""
DARTS_V2 = """Genotype(
    normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1),
            ('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)],
    normal_concat=range(2, 6),
    reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1),
            ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)],
    reduce_concat=range(2, 6))"""


def num_params(module):
    return sum(parameter.numel() for parameter in module.parameters())


def sampled(count):
    generator = torch.Generator().manual_seed(0)
    return [SPACE.sample(generator) for _ in range(count)]


@pytest.mark.parametrize(("genotype", "published"), [(DARTS_V1, 3_169_414), (DARTS_V2, 3_349_342)])
def test_published_cells_have_their_published_size(genotype, published):
    """3.2 M and 3.3 M in the paper; its code prints all digits, without the auxiliary head."""
    with torch.device("meta"):
        network = SPACE.build(SPACE.parse(genotype), num_classes=10, channels=36, cells=20)
    assert num_params(network) == published


def test_the_search_network_has_its_published_size():
    """8 cells of 16 channels with all operations on all edges: 1.930618 M."""

    def make_edge(row, ops, *sizes):
        return nn.ModuleList([op(*sizes) for op in ops])

    with torch.device("meta"):
        network = SPACE.network(make_edge, num_classes=10, channels=16, cells=8, affine=False)
    assert num_params(network) == 1_930_618


def test_the_order_of_a_pair_means_nothing():
    text = str(SPACE.parse(DARTS_V2))
    swapped = text.replace("|sep_conv_3x3~0|sep_conv_3x3~1|", "|sep_conv_3x3~1|sep_conv_3x3~0|")
    assert swapped != text
    assert SPACE.parse(swapped) == SPACE.parse(text)


def test_a_genotype_says_the_same_as_our_string():
    assert str(SPACE.parse(DARTS_V2)) == (
        "normal:|sep_conv_3x3~0|sep_conv_3x3~1|+|sep_conv_3x3~0|sep_conv_3x3~1|"
        "+|skip_connect~0|sep_conv_3x3~1|+|skip_connect~0|dil_conv_3x3~2|"
        ";reduction:|max_pool_3x3~0|max_pool_3x3~1|+|max_pool_3x3~1|skip_connect~2|"
        "+|max_pool_3x3~0|skip_connect~2|+|max_pool_3x3~1|skip_connect~2|"
    )


OURS = str(SPACE.parse(DARTS_V2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it ends there; expected 'normal:'"),
        (OURS.replace("dil_conv_3x3", "dil_conv_7x7"), "is 'dil_conv_7x7'; expected the operation"),
        (OURS.replace("none", "").replace("sep_conv_3x3", "none", 1), "character 9 is 'none'"),
        (
            OURS.replace("~1", "~0", 1),
            "expected the earlier node, another than that of the first edge: 1",
        ),
        (OURS.replace("~2|;", "~5|;"), "is '5'; expected the earlier node"),
        (OURS.replace("reduction", "reduce"), "expected ';reduction:'"),
        (OURS + "|", "expected its end"),
        (DARTS_V2[:-1], "is 'Genotype'; expected 'normal:'"),
        (DARTS_V2.replace("range(2, 6)", "range(3, 6)", 1), "is 'Genotype'; expected 'normal:'"),
        (
            DARTS_V2.replace("'dil_conv_3x3', 2", "'conv', 2"),
            "expected the operation: max_pool_3x3",
        ),
        (DARTS_V2.replace("'dil_conv_3x3', 2", "'dil_conv_3x3', 5"), "expected the earlier node"),
        (
            DARTS_V2.replace("'dil_conv_3x3', 2", "'dil_conv_3x3', 0"),
            "another than that of the first edge",
        ),
        (DARTS_V2.replace(", ('dil_conv_3x3', 2)", ""), "expected the operation"),
    ],
)
def test_what_is_no_architecture_is_refused_with_the_place(text, said):
    with pytest.raises(ConfigurationError) as refused:
        SPACE.parse(text)
    assert "character" in str(refused.value) or not text
    assert said in str(refused.value)


def test_every_node_has_two_edges_on_the_rows():
    for architecture in sampled(50):
        operations = SPACE.operations_of(architecture)
        assert len(operations) == SPACE.num_rows == 28
        for rows in SPACE.incoming:
            assert sum(operations[row] != SPACE.none for row in rows) == 2


def test_derivation_gives_back_the_architecture_that_alpha_prefers():
    for architecture in sampled(50):
        alpha = torch.zeros(28, 8)
        for row, operation in enumerate(SPACE.operations_of(architecture)):
            alpha[row, operation] = 2.0
        assert SPACE.derive(alpha) == architecture


def test_derivation_ranks_edges_by_the_share_of_their_best_operation():
    """`none` takes part in the softmax: a larger logit may be the weaker edge."""
    alpha = torch.full((28, 8), -20.0)
    edge_2_4, others = 7, [5, 6, 8]  # node 4's edges are the rows 5 to 8, from nodes 0 to 3
    alpha[others, 4] = 0.0
    alpha[edge_2_4, 4], alpha[edge_2_4, 0] = 5.0, 8.0  # 0.05 of the edge; the others have 1
    assert [source for _, source in SPACE.inputs(SPACE.derive(alpha))["normal"][2]] == [0, 1]
    alpha[edge_2_4, 0] = -20.0
    alpha[[5, 6], 0] = 1.0
    assert [source for _, source in SPACE.inputs(SPACE.derive(alpha))["normal"][2]] == [2, 3]


def test_of_equal_edges_and_operations_the_first_wins():
    derived = SPACE.inputs(SPACE.derive(torch.zeros(28, 8)))
    assert derived["normal"] == ((("max_pool_3x3", 0), ("max_pool_3x3", 1)),) * 4


def test_edge_weights_rank_edges_but_not_operations():
    alpha = torch.zeros(28, 8)
    alpha[:, 5] = 1.0
    beta = torch.zeros(28)
    beta[5], beta[8] = 1.0, 2.0  # of node 4 the edges from nodes 0 and 3
    derived = SPACE.inputs(SPACE.derive(alpha, beta))
    assert derived["normal"][2] == (("sep_conv_5x5", 0), ("sep_conv_5x5", 3))
    assert SPACE.derive(alpha, torch.ones(28)) == SPACE.derive(alpha)


class Scaled(nn.Module):
    """An edge that multiplies by a weight."""

    def __init__(self, weight, stride):
        super().__init__()
        self.weight, self.stride = weight, stride

    def forward(self, x):
        return x[:, :, :: self.stride, :: self.stride] * self.weight


def test_a_cell_sums_what_its_edges_bring_and_concatenates_the_nodes():
    rows = dict(list(enumerate(SPACE.rows))[14:])
    weights = torch.rand(28, dtype=torch.float64)
    cell = DARTSCell(
        lambda row, ops, c_in, c_out, stride: Scaled(weights[row], stride),
        rows,
        (),
        channels_before=(1, 1),
        channels=1,
        reduction=True,
        halve_first=False,
        affine=False,
    )
    cell.first, cell.second = nn.Identity(), nn.Identity()
    before_last, last = torch.randn(2, 1, 1, 6, 6, dtype=torch.float64)
    nodes = [before_last[:, :, ::2, ::2], last[:, :, ::2, ::2]]
    row = 14
    for node in (2, 3, 4, 5):
        nodes.append(sum(weights[row + source] * nodes[source] for source in range(node)))
        row += node
    assert torch.allclose(cell(before_last, last), torch.cat(nodes[2:], 1))


def test_reductions_are_at_a_third_and_two_thirds_and_only_there_are_strides():
    made = []

    def make_edge(row, ops, c_in, c_out, stride):
        made.append((row, c_in, c_out, stride))
        return ops[3](c_in, c_out, stride)

    SPACE.network(make_edge, num_classes=10, channels=4, cells=7)
    of_cells = [made[start : start + 14] for start in range(0, len(made), 14)]
    assert [cell[0][0] for cell in of_cells] == [0, 0, 14, 0, 14, 0, 0]
    assert [cell[0][1] for cell in of_cells] == [4, 4, 8, 8, 16, 16, 16]
    for row, c_in, c_out, stride in made:
        assert c_in == c_out
        assert stride == (2 if row >= 14 and SPACE.rows[row].source < 2 else 1)


@pytest.mark.parametrize("side", [9, 28])
def test_networks_take_images_of_any_side(side):
    architecture = sampled(1)[0]
    network = SPACE.build(architecture, num_classes=4, in_channels=1, channels=4, cells=3)
    assert network(torch.randn(2, 1, side, side)).shape == (2, 4)


def test_a_factorized_reduction_is_the_published_one_on_even_sides():
    reduce = FactorizedReduce(4, 6).eval()
    x = torch.randn(2, 4, 8, 8)
    positive = x.relu()
    expected = torch.cat([reduce.even(positive), reduce.odd(positive[:, :, 1:, 1:])], 1)
    assert torch.equal(reduce(x), reduce.norm(expected))


def test_a_search_network_normalises_pools():
    def last_modules(affine):
        seen = []

        def make_edge(row, ops, *sizes):
            seen.append([type(list(ops[number](*sizes).modules())[-1]) for number in (1, 2)])
            return ops[3](*sizes)

        SPACE.network(make_edge, num_classes=2, channels=4, cells=3, affine=affine)
        return seen[0]

    assert last_modules(False) == [nn.BatchNorm2d, nn.BatchNorm2d]
    assert last_modules(True) == [nn.MaxPool2d, nn.AvgPool2d]
