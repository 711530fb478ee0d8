"""Counting by running: against sums by hand, and leaving the module as it was."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from fl_lightning.nas.cost.count import Cost, count


class Slimmer(nn.Linear):
    """Uses weights that it cuts out of larger ones."""

    def forward(self, x):
        return linear(x, self.weight[:2, :3], self.bias[:2])


class Attention(nn.Module):
    forward = staticmethod(scaled_dot_product_attention)


class Residual(nn.Module):
    """Of what it does only the linear layer's outputs are in new memory."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x):
        return (x + self.inside(x)).flatten(1)


IMAGE = torch.zeros(1, 4, 8, 8)
NORMS = (nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("make", "size", "multiplications"),
    [
        (lambda b: nn.Conv2d(4, 6, 3, 2, 1, bias=b), (6, 4, 4), 9 * 4),
        (lambda b: nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=b), (4, 8, 8), 25),
        (lambda b: nn.Conv2d(4, 6, 3, padding=2, dilation=2, bias=b), (6, 8, 8), 9 * 4),
        (lambda b: nn.Linear(8, 3, bias=b), (4, 8, 3), 8),
    ],
)
def test_layers_multiply_and_add_as_often_as_by_hand(make, size, multiplications, bias):
    layer = make(bias)
    outputs = torch.Size(size).numel()
    params = sum(parameter.numel() for parameter in layer.parameters())
    expected = Cost(outputs * (multiplications + bias), params, outputs)
    assert count(layer, IMAGE) == expected
    five = count(layer, IMAGE.expand(5, 4, 8, 8))  # a batch costs its examples
    assert five == Cost(5 * expected.flops, params, 5 * outputs)


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        # transposed convolutions multiply per input
        (nn.ConvTranspose2d(4, 6, 2, 2), [IMAGE], Cost(6144 + 256 * 6, 96 + 6, 256 * 6)),
        # fused attention is counted like its two products
        (
            Attention(),
            [torch.zeros(1, 2, n, 8) for n in (5, 7, 7)],
            Cost(2 * 2 * 5 * 7 * 8, 0, 2 * 5 * 8),
        ),
        # biases count whatever the memory of the input is like
        (nn.Linear(4, 3), [torch.zeros(1, 4, 5).transpose(1, 2)], Cost(5 * 3 * (4 + 1), 15, 15)),
        (Slimmer(8, 8), [torch.zeros(1, 3)], Cost(2 * 3 + 2, 72, 2)),
        # norms, activations and pools multiply nothing
        (nn.Sequential(*NORMS), [torch.zeros(1, 2, 4, 4)], Cost(0, 4, 2 * 16 + 2 * 16 + 2 * 4 + 2)),
        (nn.Sequential(nn.Flatten(), Residual(), Residual()), [torch.zeros(1, 2, 2)],
         Cost(2 * 4 * (4 + 1), 2 * 20, 2 * 4)),
    ],
)  # fmt: skip
def test_costs_by_hand(module, inputs, expected):
    assert count(module, *inputs) == expected


@pytest.mark.parametrize(("batch_first", "training"), [(True, False), (True, True), (False, False)])
def test_attention_is_counted_though_it_could_run_fused(batch_first, training):
    """In evaluation mode PyTorch would run the layer as one operator that no counter sees into."""
    tokens, width, hidden = 16, 32, 64
    layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.1, batch_first=batch_first)
    layer.train(training)
    x = torch.zeros((1, tokens, width) if batch_first else (tokens, 1, width))
    projections = tokens * width * 4 * width
    attention = 2 * tokens * tokens * width
    feed_forward = 2 * tokens * width * hidden
    biases = tokens * (4 * width + hidden + width)
    assert count(layer, x).flops == projections + attention + feed_forward + biases


def test_attention_puts_out_what_its_parts_do_not_show():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(1, 5, 8)
    assert count(attention, x, x, x).activations == 5 * 8 + 5 * 5  # and the weights that it returns


def test_the_module_is_left_as_it_was():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU())
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    random = torch.get_rng_state()
    count(network, torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_fails_leaves_no_hooks_behind():
    with pytest.raises(RuntimeError):
        count(nn.Linear(4, 3), torch.zeros(1, 5))
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_nothing_is_computed_on_the_meta_device():
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 512, 3), nn.ReLU(), nn.Conv2d(512, 512, 3))
        cost = count(network, torch.empty(1, 3, 512, 512))
    assert cost.flops == 510**2 * 512 * 28 + 508**2 * 512 * (9 * 512 + 1)
