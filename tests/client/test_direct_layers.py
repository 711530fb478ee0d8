"""Layers by our own operators: a module computes PyTorch's numbers, in every transform."""

import pytest
import torch
from test_direct_kernels import assert_near, draws
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from fl_lightning.kernels.c_library import c_library
from fl_lightning.kernels.layers import direct_layers, other_forwards, reason_against_direct_layers
from fl_lightning.kernels.linear import FEW

pytestmark = pytest.mark.skipif(
    reason_against_direct_layers(nn.Conv2d(1, 1, 1)) is not None, reason="no compiler"
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=(1, 2)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 9, (3, 2), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9 * 2 * 4, 4),
    )


IMAGES, LABELS = draws(6, 4, 3, 9, 9), torch.arange(24).reshape(6, 4) % 4


def by_example(net):
    def loss(params, images, labels):
        def one(image, label):
            return F.cross_entropy(functional_call(net, params, (image[None],)), label[None])

        return vmap(one)(images, labels).mean()

    return loss


def whole(net):
    return lambda params, images, labels: F.cross_entropy(
        functional_call(net, params, (images,)), labels
    )


def assert_alike(net, gradients, tolerance=1e-5, **options):
    """See that a function of a network, by name, is the same by direct layers."""
    expected = gradients()
    with other_forwards(direct_layers(net, **options)):
        found = gradients()
    for name, value in expected.items():
        assert_near(found[name], value, tolerance)


@pytest.mark.parametrize(
    ("loss_of", "shared", "viewable"),
    [
        *((by_example, False, True), (by_example, True, False)),
        *((whole, False, False), (whole, True, True)),
    ],
)
def test_gradients_of_many_clients(loss_of, shared, viewable):
    net = network()
    params = {n: draws(6, *p.shape, seed=len(n)) * 0.2 for n, p in net.named_parameters()}
    start = {n: p[0] for n, p in params.items()} if shared else params

    def gradients():
        function = vmap(grad_and_value(loss_of(net)), (None if shared else 0, 0, 0))
        found, losses = function(start, IMAGES, LABELS)
        return {**found, "losses": losses}

    assert_alike(net, gradients, viewable=viewable)


def test_under_grad_alone():
    net = network()
    params = dict(net.named_parameters())
    assert_alike(net, lambda: grad(whole(net))(params, IMAGES[0], LABELS[0]))


def test_as_one_compiled_graph():
    net = network()
    params = {n: draws(6, *p.shape, seed=len(n)) * 0.2 for n, p in net.named_parameters()}
    function = vmap(grad(by_example(net)))
    is_direct = iter([False, True])

    def gradients():
        # the graph alone: test_direct_slots compiles one to machine code
        options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
        run = torch.compile(lambda *a: function(*a), **options) if next(is_direct) else function
        return run(params, IMAGES, LABELS)

    assert_alike(net, gradients, viewable=True)


def test_gradients_of_gradients():
    net = network()
    net[1] = nn.Softplus()
    x = IMAGES[0].clone().requires_grad_()

    def penalty():
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *net.parameters()])

    assert_alike(net, lambda: dict(enumerate(penalty())), tolerance=1e-4)


def test_a_models_view_of_the_last_result():
    class Viewing(nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.pool = pool  # used twice, and made before what it follows
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 2)

        def forward(self, x):
            x = self.pool(torch.relu(self.second(self.pool(torch.relu(self.first(x))))))
            return x.view(len(x), -1)

    images = draws(4, 3, 16, 16)
    for pool in (nn.MaxPool2d(2), nn.Identity()):
        net = Viewing(pool)
        with other_forwards(direct_layers(net)), pytest.raises(RuntimeError, match="view"):
            net(images)
        with other_forwards(direct_layers(net, viewable=True)):
            found = net(images)
        torch.testing.assert_close(found, net(images), rtol=1e-5, atol=1e-5)


def test_channels_stay_last_between_the_layers_of_a_sequence():
    """And what leaves it can be viewed, and hooks are called that come later."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(4, 6, 2), nn.Tanh(), nn.MaxPool2d(2)),
    )
    images = draws(4, 3, 16, 16)
    expected, layouts = net(images), []
    forwards = direct_layers(net, viewable=True)
    net[2].register_forward_hook(lambda _, __, value: layouts.append(value.is_contiguous()))
    with other_forwards(forwards):
        found = net(images)
    torch.testing.assert_close(found.view(4, -1), expected.view(4, -1), rtol=1e-5, atol=1e-5)
    assert layouts == [False]
    net[1].register_forward_hook(lambda _, __, value: layouts.append(value.is_contiguous()))
    with other_forwards(forwards):
        net(images)
    assert layouts == [False, True, True]
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert normed not in direct_layers(normed, viewable=True)


def test_other_layers_stay_pytorchs():
    with torch.device("meta"):
        large = nn.Conv2d(512, 512, 3)
    convolutions = [
        {"stride": 2},
        {"dilation": 2},
        {"padding": "same"},
        {"padding_mode": "reflect"},
    ]
    for layer in (
        *(nn.Conv2d(3, 5, 3, **options) for options in convolutions),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(3, 5, 3).double(), large.to_empty(device="cpu")),
        *(nn.Linear(7, 5), nn.Linear(20, 5).double(), nn.Bilinear(9, 9, 2)),
    ):
        assert direct_layers(layer) == {}
        assert "no dense layer or convolution" in reason_against_direct_layers(layer)
    poolings = [{"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"return_indices": True}]
    for net in (
        nn.Sequential(nn.Linear(20, 5), nn.MaxPool2d(2)),
        *(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, **options)) for options in poolings),
    ):
        assert direct_layers(net).keys() == {net[0]}


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relu_after_the_pooling_that_follows_it_is_the_same_to_the_bit(inplace):
    """Ties among what a window has, from rounding to integers, windows below zero and a NaN included."""
    net = nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(inplace), nn.MaxPool2d(2))
    for param in net.parameters():
        param.data.mul_(4).round_()
    images = draws(8, 1, 12, 12).mul(2).round()
    images[1, 0, 2, 3] = torch.nan
    v = draws(8, 16, 6, 6, seed=1)
    forwards = direct_layers(net)
    assert forwards.keys() == {net, net[0], net[2]}
    results = []
    for chosen in (forwards, {net[0]: forwards[net[0]], net[2]: forwards[net[2]]}):
        net.zero_grad()
        leaf = images.clone().requires_grad_()
        with other_forwards(chosen):
            value = net(leaf)
        value.backward(v)
        results.append([value, leaf.grad, *(param.grad for param in net.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert (results[0][0] == 0).any()


def test_layers_stay_in_order_where_someone_watches_or_another_layer_stands_between():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    seen = []
    net[1].register_forward_hook(lambda _, __, value: seen.append(value.shape[-1]))
    with other_forwards(direct_layers(net)):
        net(torch.ones(1, 1, 8, 8))
    assert seen == [6]
    for other in (nn.Tanh(), nn.AvgPool2d(2)):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), other, nn.MaxPool2d(2))
        assert net not in direct_layers(net)


def test_inputs_of_another_kind_go_to_pytorchs_layers():
    layer = nn.Linear(20, 5)
    with other_forwards(direct_layers(layer)):
        for shape in ((20,), (2, 3, 20), (FEW + 1, 20)):
            value = draws(*shape)
            assert torch.equal(layer(value), F.linear(value, layer.weight, layer.bias))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(draws(2, 19))
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2))
    with other_forwards(direct_layers(net)):
        assert net(IMAGES[0, 0]).shape == (5, 3, 3)  # an image without a batch
        with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels"):
            net(torch.ones(1, 4, 8, 8))
        with pytest.raises(RuntimeError, match=r"(?i)kernel size can't be greater"):
            net(torch.ones(1, 3, 2, 2))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(20, 5), (3, 20)),
        (nn.Linear(20, FEW + 1), (FEW, 20)),
        (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 8, 8)),
        (nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 8, 8)),
    ],
)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(layer, shape, given):
    value = draws(*shape).to(given)

    def results(value):
        leaf = value.clone().requires_grad_()
        layer.zero_grad()
        result = layer(leaf)
        result.square().sum().backward()
        return [result, leaf.grad.float(), *(param.grad for param in layer.parameters())]

    with other_forwards(direct_layers(layer)):
        expected = results(value.float())
        expected[1] = expected[1].to(given).float()  # a gradient is of its tensor's type
        with torch.autocast("cpu", torch.bfloat16):
            found = results(value)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_autocast_changes_no_bit_of_many_clients():
    layer = nn.Linear(20, FEW + 1)
    weights = {name: param.detach() for name, param in layer.named_parameters()}

    def loss(weights, value):
        return functional_call(layer, weights, (value,)).square().sum()

    each = vmap(grad(loss), (None, 0))
    for num_examples, is_same in ((2, True), (FEW + 1, False)):  # more go to PyTorch's layer
        values = draws(4, num_examples, 20)
        with other_forwards(direct_layers(layer)):
            expected = each(weights, values)
            with torch.autocast("cpu", torch.bfloat16):
                found = each(weights, values)
        assert all(torch.equal(found[name], expected[name]) == is_same for name in weights)


def test_several_threads_or_no_compiler(monkeypatch):
    layer = nn.Conv2d(3, 5, 3)
    try:
        torch.set_num_threads(2)
        assert direct_layers(layer) == {}
        assert "several threads" in reason_against_direct_layers(layer)
        torch.set_num_threads(1)
        c_library.cache_clear()
        monkeypatch.setenv("CC", "no-such-compiler")
        assert direct_layers(layer) == {}
        assert "no C compiler" in reason_against_direct_layers(layer)
    finally:
        torch.set_num_threads(1)
        c_library.cache_clear()
