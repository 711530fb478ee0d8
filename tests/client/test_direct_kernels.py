"""Dense layers, convolutions and poolings by our own operators: PyTorch's numbers, in every transform."""

import ctypes
import itertools
import mmap

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.nn import functional as F

from fl_lightning.kernels.c_library import c_library
from fl_lightning.kernels.convolution import (
    SOURCE,
    WINOGRAD,
    convolve,
    convolve_and_add,
    convolve_gradients,
    convolve_images,
    convolve_weights,
    flags,
    may_be_winograd,
)
from fl_lightning.kernels.linear import FEW, dense, dense_inputs, dense_weights
from fl_lightning.kernels.linear import SOURCE as LINEAR
from fl_lightning.kernels.linear import flags as linear_flags
from fl_lightning.kernels.window_maximum import SOURCE as WINDOWS
from fl_lightning.kernels.window_maximum import window_maximum, window_pick, window_place

pytestmark = pytest.mark.skipif(
    c_library(SOURCE, flags(1)) is None, reason="no C compiler, or no vectors of 256 bits"
)
IS_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def several(*shapes):
    return [draws(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def grouped(x, w):
    """PyTorch's own for all clients, in double precision."""
    images, weights = x.double().movedim(-1, 2), w.double()
    flat = images.transpose(0, 1).flatten(1, 2).contiguous(), weights.flatten(0, 1).contiguous()
    return F.conv2d(*flat, groups=len(x)).unflatten(1, (len(x), -1)).permute(1, 0, 3, 4, 2)


def expected_of(x, w, v):
    """Return the convolution and both gradients, in double precision."""
    leaves = x.double().requires_grad_(), w.double().requires_grad_()
    result = grouped(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, v.double())]


def sums_of(x, w, v):
    """Return what the sums are without signs: with signs they may cancel."""
    return expected_of(x.abs(), w.abs(), v.abs())


def assert_near(found, expected, tolerance=1e-5, *, among=None):
    """Compare with the largest number, or with the largest of others."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    scale = float((expected if among is None else among).abs().max())
    assert float((found - expected).abs().max()) <= tolerance * scale


def every_gradient(v, x, w):
    return convolve_gradients(v, x, w, True, True, True)


@settings(max_examples=150)
@given(
    clients=st.integers(1, 3),
    images=st.integers(1, 3),
    channels=st.integers(1, 20),
    out=st.integers(1, 60),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    more=st.tuples(st.integers(0, 16), st.integers(0, 16)),
)
# the gradient of weights goes through images in pieces of about 128 pixels
@example(clients=2, images=2, channels=3, out=9, kernel=(3, 3), more=(37, 34))
@example(clients=1, images=2, channels=2, out=9, kernel=(3, 3), more=(1, 297))
def test_convolutions_and_their_gradients(clients, images, channels, out, kernel, more):
    height, width = (k + m for k, m in zip(kernel, more, strict=True))
    x = draws(clients, images, height, width, channels)
    w = draws(clients, out, channels, *kernel, seed=1)
    v = draws(clients, images, more[0] + 1, more[1] + 1, out, seed=2)
    bias = draws(clients, out, seed=3)
    found = convolve(x, w), convolve_images(v, w), convolve_weights(v, x)
    expected, sums = expected_of(x, w, v), sums_of(x, w, v)
    for each in zip(found, expected, sums, strict=True):
        assert_near(*each[:2], among=each[2])
    added = bias.double()[:, None, None, None]
    assert_near(convolve_and_add(x, w, bias), expected[0] + added, among=sums[0] + added.abs())
    together = every_gradient(v, x, w)
    assert all(map(torch.equal, together, found[1:]))
    assert_near(together[2], v.double().sum((1, 2, 3)), among=v.double().abs().sum((1, 2, 3)))


@settings(max_examples=150)
@given(
    clients=st.integers(1, 3),
    examples=st.integers(1, 30) | st.integers(FEW - 1, FEW + 2) | st.integers(254, 330),
    size=st.integers(8, 50),
    out=st.integers(1, 30) | st.integers(FEW - 1, FEW + 2),
)
def test_dense_layers_and_both_gradients(clients, examples, size, out):
    """Of many examples weights are laid out in panels."""
    x, w, v = several((clients, examples, size), (clients, out, size), (clients, examples, out))
    found = dense(x, w)
    assert_near(found, x.double() @ w.double().mT)
    if out <= FEW:  # an example's outputs are the same bits wherever it lies
        assert torch.equal(dense(x.flip(1), w).flip(1), found)
    assert_near(dense_inputs(v, w), v.double() @ w.double())
    assert_near(dense_weights(v, x), v.double().mT @ x.double())
    none = x[:, :0]
    assert dense(none, w).shape == (clients, 0, out)
    assert torch.equal(dense_weights(v[:, :0], none), torch.zeros_like(w))


# What the functions of C read and write


def numbers(*values):
    """Return a structure of whole numbers."""
    fields = [(f"number_{place}", ctypes.c_long) for place in range(len(values))]
    return type("Numbers", (ctypes.Structure,), {"_fields_": fields})(*values)


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def written(function, shape, factors, *others):
    """Return what a function writes; it is infinite beside its tensors, where nothing is read or written."""
    rooms = []
    for factor in (torch.zeros(shape), *factors):
        room = torch.full((factor.numel() + 32,), torch.inf)
        room[16:-16] = factor.flatten()
        rooms.append(room)
    rooms[0].fill_(torch.inf)
    function(*(pointer(room[16:]) for room in rooms), *others)
    assert rooms[0][:16].isinf().all()
    assert rooms[0][-16:].isinf().all()
    return rooms[0][16:-16].view(shape)


@pytest.mark.parametrize("size", [11, 19])
@pytest.mark.parametrize("examples", [3, 257])
def test_a_dense_layer_reads_and_writes_no_further_than_its_tensors(examples, size):
    clients, out = 2, 33
    x, w, v = several((clients, examples, size), (clients, out, size), (clients, examples, out))
    sizes = [ctypes.c_long(n) for n in (clients, examples, size, out)]
    library = c_library(LINEAR, linear_flags(size))
    for name, one, other, expected in (
        ("dense", x, w, x.double() @ w.double().mT),
        ("dense_inputs", v, w, v.double() @ w.double()),
        ("dense_weights", v, x, v.double().mT @ x.double()),
    ):
        assert_near(written(library[name], expected.shape, (one, other), *sizes), expected)


@pytest.mark.parametrize("out", [1, 7, 9, 17])
def test_no_convolution_is_written_past_the_end(out):
    """Whole vectors are stored: the last one's rest lies in room that was made for it."""
    x, w, bias = several((1, 1, 3, 3, 1), (1, out, 1, 3, 3), (out,))
    library, result = c_library(SOURCE, flags(out)), torch.full((out + 2 * 16,), -7.0)
    pointers = map(pointer, (result, x, w, bias))
    ones = ctypes.c_long(1), ctypes.c_long(1)
    assert library.convolve(*pointers, *ones, numbers(1, out, 3, 3, 3, 3)) == 0
    assert_near(result[:out], grouped(x, w).flatten() + bias)
    assert (result[out + 16 :] == -7).all()


@pytest.mark.skipif(not IS_WIDE, reason="vectors of 8")
def test_wide_vectors_are_for_what_fills_more_than_half_of_one():
    for flags_of, fewest in ((flags, 9), (linear_flags, 16)):
        assert "-DLANES=8" in flags_of(fewest - 1)
        assert "-DLANES=16" in flags_of(fewest)


def test_a_client_is_computed_alike_whoever_is_beside_it():
    x, w, v, bias = several((3, 4, 9, 8, 5), (3, 7, 5, 3, 2), (3, 4, 7, 7, 7), (3, 7))
    inputs, weights, errors = several((3, 4, 21), (3, 13, 21), (3, 4, 13))
    for function, *factors in (
        (convolve, x, w),
        (convolve_images, v, w),
        (convolve_weights, v, x),
        (convolve_and_add, x, w, bias),
        (every_gradient, v, x, w),
        (dense, inputs, weights),
        (dense_inputs, errors, weights),
        (dense_weights, errors, inputs),
    ):
        alone = [function(*(factor[g : g + 1] for factor in factors)) for g in range(3)]
        together = function(*factors)
        if function is not every_gradient:
            together, alone = (together,), [(one,) for one in alone]
        assert all(map(torch.equal, together, map(torch.cat, zip(*alone, strict=True))))


# Transforms of PyTorch

PAIRS = [(0, 0), (2, 1), (0, None), (1, None), (None, 0), (None, 2)]
# weights may be frozen while biases train
BIASED = [(0, 0, 0), (5, 3, 2), (2, None, None), (0, None, 1), (None, None, 0), (None, 2, None)]
# weights of one client may stay those of all
SLOPES = [(0, 0, 0), (1, 5, 2), (2, 3, None), (None, 0, 1), (0, None, None)]
X, W, V = (2, 3, 6, 7, 4), (2, 5, 4, 3, 2), (2, 3, 4, 6, 5)


@pytest.mark.parametrize(
    ("function", "shapes", "axes"),
    [
        (convolve, (X, W), [*PAIRS, (None, 3)]),
        (convolve_images, (V, W), PAIRS),
        (convolve_weights, (V, X), PAIRS),
        (dense, ((2, 3, 9), (2, 5, 9)), PAIRS),
        (dense, ((2, 33, 9), (2, 70, 9)), PAIRS),  # with an axis more they are many
        (dense_inputs, ((2, 33, 70), (2, 70, 9)), PAIRS),
        (dense_weights, ((2, 33, 5), (2, 33, 9)), PAIRS),
        (convolve_and_add, (X, W, (2, 5)), BIASED),
        *((every_gradient, [(n, *shape[1:]) for shape in (V, X, W)], SLOPES) for n in (1, 2)),
    ],
)
def test_another_axis_gives_what_its_indices_give_one_by_one(function, shapes, axes):
    for each in axes:
        factors = [
            draws(*shape, seed=seed)
            if axis is None
            else draws(4, *shape, seed=seed).movedim(0, axis)
            for seed, (shape, axis) in enumerate(zip(shapes, each, strict=True))
        ]
        found = vmap(function, each)(*factors)
        one_by_one = [
            function(
                *(f if a is None else f.select(a, i) for f, a in zip(factors, each, strict=True))
            )
            for i in range(4)
        ]
        if isinstance(found, tuple):
            expected = tuple(map(torch.stack, zip(*one_by_one, strict=True)))
        else:
            expected = torch.stack(one_by_one)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_not_wanted_are_empty():
    v, x, w = several(V, X, W)
    every = every_gradient(v, x, w)
    for wanted in itertools.product([False, True], repeat=3):
        some = convolve_gradients(v, x, w, *wanted)
        for found, expected, needed in zip(some, every, wanted, strict=True):
            assert torch.equal(found, expected) if needed else found.shape == (2, 0)


@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_gradients_of_every_example_of_every_client(shared):
    """Weights may be one client's, one example's, or one of several models'."""
    sizes = 2, 3, 4
    own = [size for axis, size in enumerate(sizes) if axis not in shared]
    x, w, b = several((*sizes, 1, 5, 6, 3), (*own, 4, 3, 2, 3), (*own, 4))

    def theirs(x, w, b):
        return F.conv2d(x[0].movedim(-1, 1), w[0], b[0])

    def slopes_of(convolution):
        def value(w, b, x):
            return convolution(x[None], w[None], b[None]).pow(2).sum()

        function = grad(value, (0, 1, 2))
        for axis in reversed(range(len(sizes))):
            place = None if axis in shared else 0
            function = vmap(function, (place, place, 0))
        return function(w, b, x)

    for pair in zip(slopes_of(convolve_and_add), slopes_of(theirs), strict=True):
        assert_near(*pair)


def of_two_clients(x, w, b):
    return convolve_and_add(x, w, b)


def of_four_that_share(x, w, b):
    return vmap(convolve_and_add, (0, None, None))(x, w, b)


@pytest.mark.parametrize(
    ("ours", "frozen"),
    [
        (of_two_clients, ()),
        # weights that clients share get the slopes of all of them
        *((of_four_that_share, some) for some in [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]),
    ],
)
def test_slopes_of_a_convolution_and_of_these_slopes(ours, frozen):
    is_shared = ours is of_four_that_share
    if is_shared:
        leaves = several((4, 1, 3, 5, 6, 4), (1, 5, 4, 3, 2), (1, 5))
    else:
        leaves = several((2, 3, 5, 6, 4), (2, 5, 4, 3, 2), (2, 5))
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number not in frozen)
    trained = [leaf for leaf in leaves if leaf.requires_grad]

    def theirs(x, w, b):
        if is_shared:
            x, w, b = x.flatten(0, 1), w.expand(4, -1, -1, -1, -1), b.expand(4, -1)
        result = grouped(x, w) + b.double()[:, None, None, None]
        return result.unflatten(0, (4, 1)) if is_shared else result

    results = []
    for function in (ours, theirs):
        total = function(*leaves).pow(3).sum()
        slopes = torch.autograd.grad(total, trained, create_graph=True)
        again = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), trained)
        results.append([*slopes, *again])
    for pair in zip(*results, strict=True):
        assert_near(*pair, 1e-4)


# Maxima of windows


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
    count, *shape = *x.shape, *window

    def call(name, *tensors):
        library = c_library(WINDOWS)
        library[name](*map(pointer, tensors), ctypes.c_long(count), numbers(*shape))

    call("window_maximum", found[0], found[1], images)
    call("window_place", found[2], v, places)
    call("window_pick", found[3], images, places)
    assert all(
        map(torch.equal, found, [maxima, which, window_place(maxima, which, *window), maxima])
    )


# Convolutions by Winograd's method, from fewer products

NAMES = "convolve", "convolve_images", "convolve_weights"


def by_winograd(library, name, x, w, v):
    shape, factors, more = {
        "convolve": (v.shape, (x, w), [pointer(None)]),
        "convolve_images": (x.shape, (v, w), []),
        "convolve_weights": (w.shape, (v, x), []),
    }[name]
    (clients, count, height, width, channels), (_, out, _, tall, wide) = x.shape, w.shape
    sizes = ctypes.c_long(clients), ctypes.c_long(count)
    structure = numbers(channels, out, height, width, tall, wide)
    return written(library[name], shape, factors, *more, *sizes, structure)


def padded_draws(clients, images, channels, out, kernel, height, width):
    """Return images, weights and errors of a convolution with so many outputs."""
    return several(
        (clients, images, height + kernel - 1, width + kernel - 1, channels),
        (clients, out, channels, kernel, kernel),
        (clients, images, height, width, out),
    )


@pytest.mark.parametrize("lanes", [8, *([16] if IS_WIDE else [])])
@settings(max_examples=40)
@given(
    clients=st.integers(1, 3),
    images=st.integers(1, 3),
    channels=st.sampled_from([16, 32, 80]),
    out=st.sampled_from([16, 48]),
    kernel=st.sampled_from([3, 5]),
    height=st.integers(1, 14),
    width=st.integers(1, 14),
)
def test_winograds_convolutions_and_their_gradients(lanes, **sizes):
    """Tiles that reach over the edge of an image, and more than are computed at once, included."""
    library, (x, w, v) = c_library(WINOGRAD, flags(lanes)), padded_draws(**sizes)
    for name, *pair in zip(NAMES, expected_of(x, w, v), sums_of(x, w, v), strict=True):
        assert_near(by_winograd(library, name, x, w, v), pair[0], 3e-6, among=pair[1])


@pytest.mark.parametrize("kernel", [3, 5])
def test_which_convolutions_are_computed_by_winograds_method(kernel):
    library = c_library(WINOGRAD, flags(32))
    x, w, v = padded_draws(2, 3, 16, 32, kernel, 13 - kernel, 12 - kernel)
    result, images, weights = (by_winograd(library, name, x, w, v) for name in NAMES)
    assert torch.equal(convolve(x, w), result)
    assert torch.equal(convolve_images(v, w), images)
    assert torch.equal(convolve_weights(v, x), weights)
    bias = draws(2, 32, seed=3)
    added = result + bias[:, None, None, None]
    torch.testing.assert_close(convolve_and_add(x, w, bias), added, rtol=0, atol=1e-5)
    together = convolve_gradients(v, x, w, True, True, False)
    assert torch.equal(together[0], images)
    assert torch.equal(together[1], weights)
    assert may_be_winograd(kernel, kernel, 48, 128)
    for shape in (*((k, k, 16, 16) for k in (1, 2, 4, 7)), (3, 5, 16, 16), (3, 3, 16, 20)):
        assert not may_be_winograd(*shape)
    assert not may_be_winograd(3, 3, 3, 16)


def test_few_tiles_are_not_worth_the_weights():
    """One image of 4 × 4 outputs is one tile; two of 8 × 8 are eight."""
    winograd, direct = c_library(WINOGRAD, flags(16)), c_library(SOURCE, flags(16))
    for size, images, library in ((4, 7, direct), (8, 2, winograd)):
        x, w, v = padded_draws(1, images, 16, 16, 3, size, size)
        assert torch.equal(convolve_weights(v, x), by_winograd(library, NAMES[2], x, w, v))


def test_what_is_not_a_number_stays_with_its_client_and_its_image():
    x, w, v = padded_draws(3, 4, 16, 16, 3, 8, 8)
    x[1, 2, 9, 9, 15] = v[1, 2, 7, 7, 15] = torch.nan
    for found in (convolve(x, w), convolve_images(v, w)):
        is_known = found.isfinite().flatten(2).all(2)
        assert is_known.sum() == 11
        assert not is_known[1, 2]
    assert convolve_weights(v, x).isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("kernel", [3, 5])
def test_rounding_is_that_of_single_precision(kernel):
    """As the module says. With points of 1 and 2 in place of 5/8 and 5/4 it is twice as large."""
    x, w, v = padded_draws(1, 16, 64, 64, kernel, 17 - kernel, 17 - kernel)
    library = c_library(WINOGRAD, flags(64))
    bounds = 1.1e-6, 1.1e-6, {3: 1.8e-6, 5: 2.9e-6}[kernel]
    for name, expected, bound in zip(NAMES, expected_of(x, w, v), bounds, strict=True):
        off = by_winograd(library, name, x, w, v) - expected
        assert float(off.square().mean().sqrt() / expected.square().mean().sqrt()) < bound
