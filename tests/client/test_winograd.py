"""Convolutions by Winograd's method: PyTorch's numbers in double precision, from fewer products."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

pytestmark = pytest.mark.skipif(
    c_library(WINOGRAD, flags(16)) is None, reason="no C compiler, or no vectors of 256 bits"
)
NAMES = "convolve", "convolve_images", "convolve_weights"
LANES = [8, *([16] if torch.backends.cpu.get_cpu_capability() == "AVX512" else [])]


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected_of(x, w, v):
    """PyTorch's own, in double precision, of each client: the result and both gradients."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    pairs = zip(x, w, strict=True)
    clients = [F.conv2d(one.movedim(-1, 1), k) for one, k in pairs]
    result = torch.stack(clients).movedim(2, -1)
    return [result.detach(), *torch.autograd.grad(result, (x, w), v.double())]


def assert_near(found, expected, sums):
    """Compare with what the sums are without signs: those may cancel."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / sums.max()) <= 3e-6


def run(library, name, x, w, v):
    """Return what the C function writes, and see that it neither reads nor writes beyond its tensors."""
    shapes = {"convolve": v.shape, "convolve_images": x.shape, "convolve_weights": w.shape}
    factors = {"convolve": (x, w), "convolve_images": (v, w), "convolve_weights": (v, x)}[name]
    inside = []
    for factor in factors:
        room = torch.full((factor.numel() + 32,), torch.inf)
        room[16:-16] = factor.flatten()
        inside.append(room[16:])
    room = torch.full((shapes[name].numel() + 32,), torch.inf)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (room[16:], *inside)]
    more = [ctypes.c_void_p(None)] if name == "convolve" else []

    class Shape(ctypes.Structure):
        _fields_ = [(letter, ctypes.c_long) for letter in "abcdef"]

    (clients, count, height, width, channels), (_, out, _, tall, wide) = x.shape, w.shape
    sizes = ctypes.c_long(clients), ctypes.c_long(count)
    shape = Shape(channels, out, height, width, tall, wide)
    assert library[name](*pointers, *more, *sizes, shape) == 0
    assert room[:16].isinf().all()
    assert room[-16:].isinf().all()
    return room[16:-16].view(shapes[name])


@pytest.mark.parametrize("lanes", LANES)
@settings(max_examples=40)
@given(
    clients=st.integers(1, 3),
    images=st.integers(1, 3),
    channels=st.sampled_from([16, 32, 80]),
    out=st.sampled_from([16, 48]),
    kernel=st.sampled_from([3, 5]),
    more=st.tuples(st.integers(0, 13), st.integers(0, 13)),
)
def test_products_and_both_gradients(lanes, clients, images, channels, out, kernel, more):
    """Tiles that reach over the edge of an image, and more than are computed at once, included."""
    library = c_library(WINOGRAD, flags(lanes))
    x = draws(clients, images, kernel + more[0], kernel + more[1], channels)
    w = draws(clients, out, channels, kernel, kernel, seed=1)
    v = draws(clients, images, more[0] + 1, more[1] + 1, out, seed=2)
    sums = expected_of(x.abs(), w.abs(), v.abs())
    for name, expected, among in zip(NAMES, expected_of(x, w, v), sums, strict=True):
        assert_near(run(library, name, x, w, v), expected, among)


@pytest.mark.parametrize("kernel", [3, 5])
def test_it_is_what_convolutions_of_that_kind_are_computed_by(kernel):
    library = c_library(WINOGRAD, flags(32))
    x, w = draws(2, 3, 12, 11, 16), draws(2, 32, 16, kernel, kernel, seed=1)
    v = draws(2, 3, 13 - kernel, 12 - kernel, 32, seed=2)
    result, images, weights = (run(library, name, x, w, v) for name in NAMES)
    bias = draws(2, 32, seed=3)
    added = result + bias[:, None, None, None]
    for found, expected in (
        (convolve(x, w), result),
        (convolve_images(v, w), images),
        (convolve_weights(v, x), weights),
    ):
        assert torch.equal(found, expected)
    torch.testing.assert_close(convolve_and_add(x, w, bias), added, rtol=0, atol=1e-5)
    together = convolve_gradients(v, x, w, True, True, False)
    assert torch.equal(together[0], images)
    assert torch.equal(together[1], weights)


def test_which_convolutions_those_are():
    assert may_be_winograd(3, 3, 16, 16)
    assert may_be_winograd(5, 5, 48, 128)
    assert not any(may_be_winograd(k, k, 16, 16) for k in (1, 2, 4, 7))
    assert not may_be_winograd(3, 5, 16, 16)
    assert not may_be_winograd(3, 3, 16, 20)
    assert not may_be_winograd(3, 3, 3, 16)


def test_few_tiles_are_not_worth_the_weights():
    """One image of 4 × 4 outputs is one tile; two of 8 × 8 are eight."""
    by_winograd, direct = c_library(WINOGRAD, flags(16)), c_library(SOURCE, flags(16))
    w = draws(1, 16, 16, 3, 3, seed=1)
    for size, images, library in ((4, 7, direct), (8, 2, by_winograd)):
        x = draws(1, images, size + 2, size + 2, 16)
        v = draws(1, images, size, size, 16, seed=2)
        assert torch.equal(convolve_weights(v, x), run(library, NAMES[2], x, w, v))


def test_what_is_not_a_number_stays_with_its_client_and_its_image():
    x, w, v = draws(3, 4, 10, 10, 16), draws(3, 16, 16, 3, 3, seed=1), draws(3, 4, 8, 8, 16, seed=2)
    x[1, 2, 9, 9, 15] = v[1, 2, 7, 7, 15] = torch.nan
    for found in (convolve(x, w), convolve_images(v, w)):
        is_known = found.isfinite().flatten(2).all(2)
        assert is_known.sum() == 11
        assert not is_known[1, 2]
    assert convolve_weights(v, x).isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("kernel", [3, 5])
def test_rounding_is_that_of_single_precision(kernel):
    """As the module says. With points of 1 and 2 in place of 5/8 and 5/4 it is twice as large."""
    x, w = draws(1, 16, 16, 16, 64), draws(1, 64, 64, kernel, kernel, seed=1)
    v = draws(1, 16, 17 - kernel, 17 - kernel, 64, seed=2)
    library = c_library(WINOGRAD, flags(64))
    bounds = 1.1e-6, 1.1e-6, {3: 1.8e-6, 5: 2.9e-6}[kernel]
    for name, expected, bound in zip(NAMES, expected_of(x, w, v), bounds, strict=True):
        off = run(library, name, x, w, v) - expected
        assert float(off.square().mean().sqrt() / expected.square().mean().sqrt()) < bound
