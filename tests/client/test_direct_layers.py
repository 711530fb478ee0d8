"""Dense layers, convolutions and poolings by our own operators: PyTorch's numbers, in every transform."""

import ctypes
import itertools
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from fl_lightning.kernels.c_library import c_library
from fl_lightning.kernels.convolution import (
    SOURCE,
    convolve,
    convolve_and_add,
    convolve_gradients,
    convolve_images,
    convolve_weights,
)
from fl_lightning.kernels.convolution import flags as convolution_flags
from fl_lightning.kernels.layers import direct_layers, other_forwards, reason_against_direct_layers
from fl_lightning.kernels.linear import FEW, dense, dense_inputs, dense_weights
from fl_lightning.kernels.linear import SOURCE as LINEAR
from fl_lightning.kernels.linear import flags as linear_flags
from fl_lightning.kernels.window_maximum import SOURCE as WINDOWS
from fl_lightning.kernels.window_maximum import window_maximum, window_pick, window_place

pytestmark = pytest.mark.skipif(
    c_library(SOURCE, convolution_flags(1)) is None,
    reason="no C compiler, or no vectors of 256 bits",
)


def grouped(x, w):
    """PyTorch's own for all clients, in double precision."""
    images, weights = x.double().movedim(-1, 2), w.double()
    flat = images.transpose(0, 1).flatten(1, 2).contiguous(), weights.flatten(0, 1).contiguous()
    return F.conv2d(*flat, groups=len(x)).unflatten(1, (len(x), -1)).permute(1, 0, 3, 4, 2)


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found, expected, tolerance=1e-5, *, among=None):
    """Compare with the largest number, or with what sums are without signs: those may cancel."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    scale = float((expected if among is None else among).abs().max())
    assert float((found - expected).abs().max()) <= tolerance * scale


@settings(max_examples=150)
@given(
    clients=st.integers(1, 3),
    images=st.integers(1, 3),
    channels=st.integers(1, 20),
    out=st.integers(1, 60),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    more=st.tuples(st.integers(0, 16), st.integers(0, 16)),
)
def test_products_and_both_gradients(clients, images, channels, out, kernel, more):
    height, width = (k + m for k, m in zip(kernel, more, strict=True))
    x = draws(clients, images, height, width, channels)
    w = draws(clients, out, channels, *kernel, seed=1)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = grouped(*leaves)
    v = draws(*expected.shape, seed=2)
    found = convolve(x, w)
    assert_near(found, expected, among=grouped(x.abs(), w.abs()))
    gradients = torch.autograd.grad(expected, leaves, v.double())
    absolute = x.abs().requires_grad_(), w.abs().requires_grad_()
    sums = torch.autograd.grad(grouped(*absolute), absolute, v.double().abs())
    assert_near(convolve_images(v, w), gradients[0], among=sums[0])
    assert_near(convolve_weights(v, x), gradients[1], among=sums[1])
    bias = draws(clients, out, seed=3)
    among = grouped(x.abs(), w.abs()) + bias.double().abs()[:, None, None, None]
    assert_near(
        convolve_and_add(x, w, bias), expected + bias.double()[:, None, None, None], among=among
    )
    together = convolve_gradients(v, x, w, True, True, True)
    assert torch.equal(together[0], convolve_images(v, w))
    assert torch.equal(together[1], convolve_weights(v, x))
    assert_near(together[2], v.double().sum((1, 2, 3)), among=v.double().abs().sum((1, 2, 3)))


@settings(max_examples=150)
@given(
    clients=st.integers(1, 3),
    examples=st.integers(1, 30) | st.integers(FEW - 1, FEW + 2),
    size=st.integers(8, 50),
    out=st.integers(1, 30) | st.integers(FEW - 1, FEW + 2),
)
def test_dense_layers_and_both_gradients(clients, examples, size, out):
    x, w = draws(clients, examples, size), draws(clients, out, size, seed=1)
    v = draws(clients, examples, out, seed=2)
    assert_near(dense(x, w), x.double() @ w.double().mT)
    assert_near(dense_inputs(v, w), v.double() @ w.double())
    assert_near(dense_weights(v, x), v.double().mT @ x.double())
    none = x[:, :0]
    assert dense(none, w).shape == (clients, 0, out)
    assert torch.equal(dense_weights(v[:, :0], none), torch.zeros_like(w))


@given(
    clients=st.integers(1, 2),
    examples=st.integers(254, 330),
    size=st.integers(8, 40),
    out=st.integers(30, FEW),
)
def test_a_dense_layer_of_many_examples(clients, examples, size, out):
    """Its weights are laid out in panels. An example's outputs are the same bits wherever it lies."""
    x, w = draws(clients, examples, size), draws(clients, out, size, seed=1)
    found = dense(x, w)
    assert_near(found, x.double() @ w.double().mT)
    assert torch.equal(dense(x.flip(1), w).flip(1), found)


@pytest.mark.parametrize("size", [11, 19])
@pytest.mark.parametrize("examples", [3, 257])
def test_a_dense_layer_reads_and_writes_no_further_than_its_tensors(examples, size):
    """What lies beside them is infinite, and stays so."""
    clients, out = 2, 33
    shapes = {"x": (examples, size), "w": (out, size), "v": (examples, out)}
    factors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        room = torch.full((clients * shape[0] * shape[1] + 32,), torch.inf)
        factors[name] = room[16:-16].view(clients, *shape)
        factors[name].copy_(draws(clients, *shape, seed=seed))
    x, w, v = factors.values()
    assert_near(dense(x, w), x.double() @ w.double().mT)
    assert_near(dense_inputs(v, w), v.double() @ w.double())
    assert_near(dense_weights(v, x), v.double().mT @ x.double())
    library = c_library(LINEAR, linear_flags(size))
    for run, one, other, written in (
        (library.dense, x, w, clients * examples * out),
        (library.dense_weights, v, x, clients * out * size),
    ):
        numbers = (ctypes.c_long(n) for n in (clients, examples, size, out))
        room = torch.full((written + 32,), torch.inf)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (room[16:], one, other))
        run(*pointers, *numbers)
        assert room[:16].isinf().all()
        assert room[16:-16].isfinite().all()
        assert room[-16:].isinf().all()


def test_an_image_of_many_rows_and_wide_ones():
    """The gradient of weights goes through images in pieces of about 128 pixels."""
    for shape in ((2, 2, 40, 37, 3), (1, 2, 4, 300, 2)):
        x, w = draws(*shape), draws(shape[0], 9, shape[-1], 3, 3, seed=1).requires_grad_()
        v = draws(*grouped(x, w).shape, seed=2)
        (expected,) = torch.autograd.grad(grouped(x, w), w, v.double())
        assert_near(convolve_weights(v, x), expected)


def test_a_client_is_computed_alike_whoever_is_beside_it():
    x, w = draws(3, 4, 9, 8, 5), draws(3, 7, 5, 3, 2, seed=1)
    v = draws(3, 4, 7, 7, 7, seed=2)
    inputs, weights, errors = draws(3, 4, 21), draws(3, 13, 21, seed=1), draws(3, 4, 13, seed=2)
    for function, one, other in (
        (convolve, x, w),
        (convolve_images, v, w),
        (convolve_weights, v, x),
        (dense, inputs, weights),
        (dense_inputs, errors, weights),
        (dense_weights, errors, inputs),
    ):
        together = function(one, other)
        alone = [function(one[g : g + 1], other[g : g + 1]) for g in range(3)]
        assert torch.equal(together, torch.cat(alone))
    bias = draws(3, 7, seed=3)
    alone = [convolve_and_add(x[g : g + 1], w[g : g + 1], bias[g : g + 1]) for g in range(3)]
    assert torch.equal(convolve_and_add(x, w, bias), torch.cat(alone))
    together = convolve_gradients(v, x, w, True, True, True)
    alone = [
        convolve_gradients(*(t[g : g + 1] for t in (v, x, w)), True, True, True) for g in range(3)
    ]
    for found, expected in zip(together, map(torch.cat, zip(*alone, strict=True)), strict=True):
        assert torch.equal(found, expected)


def assert_alike_over_axes(function, shapes, axes):
    """An axis more gives what its indices give one by one."""
    factors = []
    for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True)):
        factor = draws(*(() if axis is None else (4,)), *shape, seed=seed)
        factors.append(factor if axis is None else factor.movedim(0, axis))

    def at(i):
        return [f if a is None else f.select(a, i) for f, a in zip(factors, axes, strict=True)]

    found = vmap(function, axes)(*factors)
    expected = torch.stack([function(*at(i)) for i in range(4)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0), (2, 1), (0, None), (1, None), (None, 0), (None, 3)])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (convolve, ((2, 3, 6, 7, 4), (2, 5, 4, 3, 2))),
        (convolve_images, ((2, 3, 4, 6, 5), (2, 5, 4, 3, 2))),
        (convolve_weights, ((2, 3, 4, 6, 5), (2, 3, 6, 7, 4))),
        (dense, ((2, 3, 9), (2, 5, 9))),
        (dense, ((2, 33, 9), (2, 70, 9))),  # with an axis more they are many
        (dense_inputs, ((2, 33, 70), (2, 70, 9))),
        (dense_weights, ((2, 33, 5), (2, 33, 9))),
    ],
)
def test_another_axis_over_one_or_both(function, shapes, axes):
    axes = tuple(a if a is None else min(a, len(s) - 1) for a, s in zip(axes, shapes, strict=True))
    assert_alike_over_axes(function, shapes, axes)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (5, 3, 2), (2, None, None), (0, None, 1), (None, None, 0), (None, 2, None)]
)
def test_another_axis_over_some_of_three(axes):
    """Weights may be frozen while biases train."""
    shapes = (2, 3, 6, 7, 4), (2, 5, 4, 3, 2), (2, 5)
    assert_alike_over_axes(convolve_and_add, shapes, axes)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (1, 5, 2), (2, 3, None), (None, 0, 1), (0, None, None)]
)
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("result", [0, 1, 2])
def test_another_axis_over_gradients(result, clients, axes):
    """Weights of one client may stay those of all."""
    shapes = (clients, 3, 4, 6, 5), (clients, 3, 6, 7, 4), (clients, 5, 4, 3, 2)
    every = (True, True, True)
    assert_alike_over_axes(
        lambda *factors: convolve_gradients(*factors, *every)[result], shapes, axes
    )


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_gradients_that_are_not_wanted_are_empty(wanted):
    v, x, w = draws(2, 3, 4, 6, 5), draws(2, 3, 6, 7, 4, seed=1), draws(2, 5, 4, 3, 2, seed=2)
    every = convolve_gradients(v, x, w, True, True, True)
    for found, expected, needed in zip(
        convolve_gradients(v, x, w, *wanted), every, wanted, strict=True
    ):
        assert torch.equal(found, expected) if needed else found.shape == (2, 0)


@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_gradients_of_every_example_of_every_client(shared):
    """Weights may be one client's, one example's, or one of several models'."""
    sizes = 2, 3, 4
    own = [size for axis, size in enumerate(sizes) if axis not in shared]
    x, w, b = draws(*sizes, 1, 5, 6, 3), draws(*own, 4, 3, 2, 3, seed=1), draws(*own, 4, seed=2)

    def loss(convolution):
        def value(w, b, x):
            return convolution(x[None], w[None], b[None]).pow(2).sum()

        return grad(value, (0, 1, 2))

    def theirs(x, w, b):
        return F.conv2d(x[0].movedim(-1, 1), w[0], b[0])

    def of_all(function):
        for axis in reversed(range(len(sizes))):
            place = None if axis in shared else 0
            function = vmap(function, (place, place, 0))
        return function

    expected = of_all(loss(theirs))(w, b, x)
    for found, slopes in zip(of_all(loss(convolve_and_add))(w, b, x), expected, strict=True):
        assert_near(found, slopes)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_slopes_of_gradients_that_all_clients_sum(frozen):
    """Weights that they share get the slopes of all of them."""
    leaves = [draws(4, 1, 3, 5, 6, 4), draws(1, 5, 4, 3, 2, seed=1), draws(1, 5, seed=2)]
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number not in frozen)
    trained = [leaf for leaf in leaves if leaf.requires_grad]

    def ours(x, w, b):
        return vmap(convolve_and_add, (0, None, None))(x, w, b)

    def theirs(x, w, b):
        expanded = grouped(x.flatten(0, 1), w.expand(4, -1, -1, -1, -1)).unflatten(0, (4, 1))
        return expanded + b.double()[:, None, None, None]

    results = []
    for function in (ours, theirs):
        total = function(*leaves).pow(3).sum()
        slopes = torch.autograd.grad(total, trained, create_graph=True)
        again = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), trained)
        results.append([*slopes, *again])
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected, 1e-4)


def test_slopes_of_a_convolution_and_of_these_slopes():
    leaves = draws(2, 3, 5, 6, 4), draws(2, 5, 4, 3, 2, seed=1), draws(2, 5, seed=2)
    leaves = [leaf.double().requires_grad_() for leaf in leaves]

    def ours(x, w, b):
        return convolve_and_add(x.float(), w.float(), b.float()).double()

    def theirs(x, w, b):
        return grouped(x, w) + b[:, None, None, None]

    results = []
    for function in (ours, theirs):
        slopes = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, create_graph=True)
        total = sum(slope.square().sum() for slope in slopes)
        results.append([*slopes, *torch.autograd.grad(total, leaves)])
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected, 1e-4)


@pytest.mark.parametrize("channels", [1, 6, 8, 11, 16, 20])
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (1, 4), (1, 1)])
def test_maxima_are_those_of_pytorch_to_the_bit(window, channels):
    """Ties, from rounding to integers, and a NaN included."""
    x = draws(3, 6 * window[0], 5 * window[1], channels).mul(2).round()
    x[1, 2, 3, channels // 2] = torch.nan
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, which = window_maximum(ours, *window)
    expected = F.max_pool2d(theirs.movedim(-1, 1), window).movedim(1, -1)
    assert torch.equal(found.nan_to_num(99), expected.nan_to_num(99))
    v = draws(*expected.shape)
    found.backward(v)
    expected.backward(v)
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(window_pick(ours.grad, which, *window), v)


def before_a_wall(values):
    """Return a copy behind which memory can be neither read nor written."""
    page = mmap.PAGESIZE
    size = -(-values.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    begin = size - values.nbytes
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=begin)
    return copy.view(values.shape).copy_(values)


@pytest.mark.parametrize("channels", [1, 6, 8, 11])
@pytest.mark.parametrize("window", [(2, 2), (3, 1)])
def test_windows_end_where_memory_does(window, channels):
    x = draws(2, 2 * window[0], 3 * window[1], channels)
    maxima, which = window_maximum(x, *window)
    images, v, places = before_a_wall(x), before_a_wall(maxima), before_a_wall(which)
    found = [before_a_wall(torch.zeros_like(t)) for t in (maxima, which, x, maxima)]
    sizes = [ctypes.c_long(size) for size in (*x.shape, *window)]

    class Shape(ctypes.Structure):
        _fields_ = [(letter, ctypes.c_long) for letter in "abcde"]

    def call(name, *tensors):
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        c_library(WINDOWS)[name](*pointers, sizes[0], Shape(*sizes[1:]))

    call("window_maximum", found[0], found[1], images)
    call("window_place", found[2], v, places)
    call("window_pick", found[3], images, places)
    expected = [maxima, which, window_place(maxima, which, *window), maxima]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, **{"padding": (1, 2)} | options),
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


@pytest.mark.parametrize("viewable", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss_of", [by_example, whole])
def test_gradients_of_many_clients(loss_of, shared, viewable):
    net = network()
    params = {n: draws(6, *p.shape, seed=len(n)) * 0.2 for n, p in net.named_parameters()}
    start = {n: p[0] for n, p in params.items()} if shared else params

    def gradients():
        function = grad_and_value(loss_of(net))
        return vmap(function, (None if shared else 0, 0, 0))(start, IMAGES, LABELS)

    expected, losses = gradients()
    with other_forwards(direct_layers(net, viewable=viewable)):
        found, others = gradients()
    torch.testing.assert_close(others, losses)
    for name, value in expected.items():
        assert_near(found[name], value)


def test_as_one_compiled_graph():
    net = network()
    params = {n: draws(6, *p.shape, seed=len(n)) * 0.2 for n, p in net.named_parameters()}
    function = vmap(grad_and_value(by_example(net)))
    expected, _ = function(params, IMAGES, LABELS)
    with other_forwards(direct_layers(net, viewable=True)):
        # the graph alone: test_direct_slots compiles one to machine code
        options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
        compiled = torch.compile(lambda *a: function(*a), **options)
        found, _ = compiled(params, IMAGES, LABELS)
    for name, value in expected.items():
        assert_near(found[name], value)


def test_gradients_of_gradients():
    net = network()
    net[1] = nn.Softplus()
    x = IMAGES[0].clone().requires_grad_()

    def penalty():
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *net.parameters()])

    expected = penalty()
    with other_forwards(direct_layers(net)):
        found = penalty()
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, 1e-4)


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


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "reflect"}],
    ids=str,
)
def test_other_convolutions_stay_pytorchs(options):
    layer = nn.Conv2d(3, 5, 3, **options)
    assert direct_layers(layer) == {}
    assert "no dense layer or convolution" in reason_against_direct_layers(layer)
    assert direct_layers(layer.double()) == {}
    assert direct_layers(nn.Conv2d(4, 4, 3, groups=2)) == {}
    with torch.device("meta"):
        large = nn.Conv2d(512, 512, 3)
    large.to_empty(device="cpu")
    assert direct_layers(large) == {}


def test_other_dense_layers_stay_pytorchs():
    for layer in (nn.Linear(7, 5), nn.Linear(20, 5).double(), nn.Bilinear(9, 9, 2)):
        assert direct_layers(layer) == {}
    small = nn.Sequential(nn.Linear(20, 5), nn.MaxPool2d(2))
    assert direct_layers(small).keys() == {small[0]}


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"return_indices": True}]
)
def test_other_poolings_stay_pytorchs(options):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, **options))
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


@pytest.mark.parametrize("shape", [(4, FEW + 1, 20), (4, 2, 20)])
def test_autocast_changes_no_bit_of_many_clients(shape):
    layer = nn.Linear(20, FEW + 1)
    weights = {name: param.detach() for name, param in layer.named_parameters()}

    def loss(weights, value):
        return functional_call(layer, weights, (value,)).square().sum()

    each = vmap(grad(loss), (None, 0))
    with other_forwards(direct_layers(layer)):
        expected = each(weights, draws(*shape))
        with torch.autocast("cpu", torch.bfloat16):
            found = each(weights, draws(*shape))
    for name, gradient in found.items():
        is_few = shape[1] <= FEW
        assert torch.equal(gradient, expected[name]) == is_few  # more go to PyTorch's layer


def test_several_threads_or_no_compiler(monkeypatch):
    layer = nn.Conv2d(3, 5, 3)
    torch.set_num_threads(2)
    try:
        assert direct_layers(layer) == {}
        assert "several threads" in reason_against_direct_layers(layer)
    finally:
        torch.set_num_threads(1)
    c_library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    try:
        assert direct_layers(layer) == {}
        assert "no C compiler" in reason_against_direct_layers(layer)
    finally:
        c_library.cache_clear()


@pytest.mark.parametrize("out", [1, 7, 9, 17])
def test_nothing_is_written_past_the_end(out):
    """Whole vectors are stored: the last one's rest lies in room that was made for it."""
    x, w = draws(1, 1, 3, 3, 1), draws(1, out, 1, 3, 3, seed=1)
    library = c_library(SOURCE, convolution_flags(out))
    result = torch.full((out + 2 * 16,), -7.0)

    class Shape(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in "abcdef"]

    bias = draws(out, seed=2)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (result, x, w, bias)]
    shape = Shape(1, out, 3, 3, 3, 3)
    assert library.convolve(*pointers, ctypes.c_long(1), ctypes.c_long(1), shape) == 0
    assert_near(result[:out], grouped(x, w).flatten() + bias)
    assert (result[out + 16 :] == -7).all()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vectors of 8")
def test_wide_vectors_are_for_what_fills_more_than_half_of_one():
    for flags, fewest in ((convolution_flags, 9), (linear_flags, 16)):
        assert "-DLANES=8" in flags(fewest - 1)
        assert "-DLANES=16" in flags(fewest)


def test_under_grad_alone():
    net = network()
    params = dict(net.named_parameters())
    expected = grad(whole(net))(params, IMAGES[0], LABELS[0])
    with other_forwards(direct_layers(net)):
        found = grad(whole(net))(params, IMAGES[0], LABELS[0])
    for name, value in expected.items():
        assert_near(found[name], value)
