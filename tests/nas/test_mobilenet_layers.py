"""The MobileNet space as operations: network, strings, costs."""

import pytest
import torch
from test_size_spaces import TINY_MOBILENET
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import WeighedEdge, cost_table
from fl_lightning.nas.spaces.mobilenet import MobileNet, small_mobilenet
from fl_lightning.nas.spaces.mobilenet_layers import SKIP, MobileNetLayers
from fl_lightning.nas.spaces.space import Networks, SearchSpace

SPACE = MobileNetLayers()
TINY = MobileNetLayers(TINY_MOBILENET)


class Mixed(WeighedEdge):
    """All operations, weighed; notes where it stands."""

    def __init__(self, row, candidates, channels_in, channels_out, stride):
        super().__init__()
        self.row, self.shape = row, (channels_in, channels_out, stride)
        self.operations = nn.ModuleList(
            candidate(channels_in, channels_out, stride) for candidate in candidates
        )

    def forward(self, x):
        pairs = zip(self.operations, self.weights[self.row], strict=True)
        return sum(weight * operation(x) for operation, weight in pairs)


def test_there_are_seven_operations_on_twenty_layers():
    assert SPACE.operations == ("k3e3", "k3e6", "k5e3", "k5e6", "k7e3", "k7e6", SKIP)
    assert (SPACE.num_rows, SPACE.size) == (20, 7**20)
    assert [decision.name for decision in TINY.decisions][1:3] == [
        "stage 1 layer 2",
        "stage 2 layer 1",
    ]


def test_rows_stand_in_order_with_the_shapes_of_the_stages():
    network = TINY.network(Mixed, num_classes=5)
    assert [(layer.row, layer.shape) for layer in network.layers] == [
        (0, (8, 8, 2)),
        (1, (8, 8, 1)),
        (2, (8, 16, 2)),
        (3, (16, 16, 1)),
    ]
    assert [str(row) for row in TINY.rows] == ["0→1", "1→2", "0→1", "1→2"]


def test_one_hot_weights_give_the_network_of_that_architecture():
    torch.manual_seed(0)
    mixed = TINY.network(Mixed, num_classes=5).double()
    x = torch.randn(3, 3, 13, 13, dtype=torch.float64)
    for choices in ((0, 6, 5, 2), (6, 1, 6, 6), (3, 4, 2, 0)):
        architecture = TINY.architecture(choices)
        fixed = TINY.build(architecture, num_classes=5).double()
        chosen = {}
        for name, own in mixed.state_dict().items():
            piece = name.split(".")
            if piece[0] == "layers":
                row, operation = int(piece[1]), int(piece[3])
                if choices[row] == operation:
                    chosen[".".join(["layers", piece[1], *piece[4:]])] = own
            else:
                chosen[name] = own
        fixed.load_state_dict(chosen)
        weights = nn.functional.one_hot(torch.tensor(choices), 7).double()
        torch.testing.assert_close(mixed(x, weights), fixed(x), rtol=1e-12, atol=1e-12)


def test_a_skip_inside_a_stage_is_nothing_at_all():
    skips = TINY.build(TINY.parse(f"k3e3-{SKIP}|{SKIP}-{SKIP}"), num_classes=5)
    kinds = [type(layer) for layer in skips.layers]
    assert kinds[1] is kinds[3] is nn.Identity
    assert kinds[2] is nn.Sequential


@pytest.mark.parametrize("affine", [True, False])
def test_only_networks_that_are_kept_scale(affine):
    network = TINY.network(Mixed, num_classes=5, affine=affine)
    norms = [layer for layer in network.layers.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all(norm.affine == affine for norm in norms)
    stem = [layer for layer in network.stem.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all(norm.affine for norm in stem)


def test_costs_are_those_of_the_built_network():
    generator = torch.Generator().manual_seed(0)
    for channels in (8, 16):
        architecture = TINY.sample(generator)
        shape = {"side": 13, "in_channels": 3, "num_classes": 10, "channels": channels}
        networks = Networks(TINY, shape.pop("side"), shape)
        assert networks.cost(architecture) == SearchSpace.counted(TINY, architecture, networks)
    narrow, wide = (TINY.cost(architecture, channels=channels).flops for channels in (8, 16))
    assert narrow < wide


def test_a_layer_costs_what_the_same_block_costs_in_the_space_of_sizes():
    sizes = small_mobilenet()
    full = sizes.parse("|".join(["k5e6-k5e6-k5e6-k5e6"] * 5))
    assert SPACE.cost(SPACE.architecture([3] * 20)) == sizes.cost(full)
    flops = cost_table(Networks(SPACE, 32, {"in_channels": 3, "num_classes": 10}))["flops"].of_rows
    assert flops.shape == (20, 7)
    assert (flops[:, :6] > 0).all()
    # skips cost something where a stage opens; the first stage changes neither side nor channels
    assert flops[:, 6].nonzero().flatten().tolist() == [4, 8, 12, 16]


def test_the_best_operation_of_each_row_is_derived():
    alpha = torch.zeros(4, 7)
    alpha[[0, 1, 2, 3], [2, 6, 0, 5]] = 1
    assert str(TINY.derive(alpha)) == f"k5e3-{SKIP}|k3e3-k7e6"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k3e3-k3e3-k3e3|k3e3", r"character 10 is '-'; expected '\|'"),
        (
            "k3e4-k3e3|k3e3-k3e3",
            "character 1 is 'k3e4'; expected the option of stage 1 layer 1: k3e3, k3e6",
        ),
        ("k3e3-k3e3|k3e3", "it ends there; expected '-'"),
    ],
)
def test_what_does_not_parse_says_where(text, message):
    with pytest.raises(ConfigurationError, match=message):
        TINY.parse(text)


def test_another_number_of_layers_or_channels_is_refused():
    with pytest.raises(ConfigurationError, match=r"cells must be 2 for mobilenet_layers, .*got 5"):
        TINY.network(Mixed, num_classes=5, cells=5)
    with pytest.raises(
        ConfigurationError, match="channels must be a multiple of 8 for mobilenet_layers"
    ):
        TINY.network(Mixed, num_classes=5, channels=4)


def test_the_default_is_the_space_for_small_images():
    assert MobileNetLayers() == MobileNetLayers(small_mobilenet())
    assert MobileNetLayers() != MobileNetLayers(MobileNet())
