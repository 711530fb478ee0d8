"""Convolutions of many clients, each with its own weights, as one operator.

    y[g, b] = x[g, b] * w[g] + b[g]     x (G, B, H, W, C),  w (G, O, C, kH, kW),  y (G, B, H', W', O)

PyTorch's CPU kernels are made for hundreds of images and channels. With ten of each, most of their time
is overhead, and grouped convolutions for several clients make it worse. `direct_convolution.c` (see
`c_library`) multiplies the images in place, with channels last, without unfolding them. G = 1 is the
ordinary convolution. Computation is in float32, on one thread.

Kernels of 3 × 3 and 5 × 5 between 16, 32, 48 … channels take about half that time by Winograd's
algorithm, with 25 % or 36 % of the products: `winograd.c`. With 64 channels, 16 images of 16 × 16 and
normal numbers, errors of results and image gradients are 1e-6 of their standard deviation, of weight
gradients 1.6e-6 (5 × 5: 2.6e-6). Direct sums have errors of 2e-7 to 7e-7.

Sources: Zhang, Franchetti, Low, High performance zero-memory overhead direct convolutions, ICML 2018.
Differs: images keep their layout, only weights are copied. Lavin and Gray, Fast algorithms for
convolutional neural networks, CVPR 2016, F(4 × 4, 3 × 3) and, in the same way, F(2 × 2, 5 × 5).
Differs: interpolation points 5/8 and 5/4 instead of 1 and 2, gradients by the transposed transforms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, reduce
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.kernels.c_library import c_function, vector_flags
from fl_lightning.kernels.c_operators import (
    VmapRule,
    along_first_axis,
    along_first_or_second_axis,
    joined,
    operator,
)

SOURCE = Path(__file__).parent / "c" / "direct_convolution.c"
WINOGRAD = Path(__file__).parent / "c" / "winograd.c"
_MOST_LANES = 16  # of a vector; the sources write whole ones
_WINOGRAD_OUTPUTS = {3: 4, 5: 2}  # of a tile, in a line, by the size of the kernel
_FEWEST_TILES = 8  # of a client's images, for which its weights are worth transforming


class _ConvolutionShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("in", "out", "height", "width", "tall", "wide")]


_TYPES = (*(ctypes.c_void_p,) * 3, *(ctypes.c_long,) * 2, _ConvolutionShape)
_BIASED_TYPES = (ctypes.c_void_p, *_TYPES)


@cache
def flags(count: int) -> tuple[str, ...]:
    """Return compiler flags for C loops over ``count`` contiguous values.

    This is the number of output channels, or, for some results, a kernel row times the input channels.
    """
    return ("-ffp-contract=fast", *vector_flags(count))


def may_be_winograd(tall: int, wide: int, channels: int, out: int) -> bool:
    """True if a convolution of this kernel size and channels may use Winograd's algorithm, given enough images.

    Example:
        >>> may_be_winograd(3, 3, 16, 64), may_be_winograd(3, 3, 3, 64), may_be_winograd(1, 1, 16, 64)
        (True, False, False)
    """
    fills_vectors = channels % _MOST_LANES == out % _MOST_LANES == 0
    return fills_vectors and tall == wide and tall in _WINOGRAD_OUTPUTS


def _is_winograd(images: torch.Size, weights: torch.Size) -> bool:
    (_, count, height, width, _), (_, out, channels, tall, wide) = images, weights
    if not may_be_winograd(tall, wide, channels, out):
        return False
    size = _WINOGRAD_OUTPUTS[tall]
    return (
        count * ceil((height - tall + 1) / size) * ceil((width - wide + 1) / size) >= _FEWEST_TILES
    )


def _convolve(images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = _output_shape(images, weights)
    # not as a view, of which autograd lets nobody change the numbers in place
    result = torch.empty(shape.numel() + _MOST_LANES).resize_(shape)
    bias = None if bias is None else bias.contiguous()
    pointer = None if bias is None else bias.data_ptr()
    return _run("convolve", result, images, weights, pointer, sizes=(images.shape, weights.shape))


def _convolve_images(gradients: Tensor, weights: Tensor) -> Tensor:
    result = gradients.new_empty(_image_shape(gradients, weights))
    return _run("convolve_images", result, gradients, weights, sizes=(result.shape, weights.shape))


def _convolve_weights(gradients: Tensor, images: Tensor) -> Tensor:
    result = images.new_empty(_weight_shape(gradients, images))
    return _run("convolve_weights", result, gradients, images, sizes=(images.shape, result.shape))


def _run(
    name: str,
    result: Tensor,
    one: Tensor,
    other: Tensor,
    *more: int | None,
    sizes: tuple[torch.Size, torch.Size],
) -> Tensor:
    """Call the C library for a convolution or one of its gradients, given its two factors."""
    (clients, count, height, width, _), (_, out, channels, tall, wide) = sizes
    one, other = one.contiguous(), other.contiguous()
    pointers = (result.data_ptr(), one.data_ptr(), other.data_ptr(), *more)
    shape = _ConvolutionShape(channels, out, height, width, tall, wide)
    source, side_by_side = SOURCE, wide * channels if name == "convolve_images" else out
    if _is_winograd(*sizes):
        source, side_by_side = WINOGRAD, out
    types = _BIASED_TYPES if more else _TYPES
    if c_function(source, flags(side_by_side), name, *types)(*pointers, clients, count, shape):
        raise MemoryError("there is no memory left for a convolution's weights")
    return result


def _output_shape(images: Tensor, weights: Tensor) -> torch.Size:
    (clients, count, height, width, _), (_, out, _, tall, wide) = images.shape, weights.shape
    return torch.Size((clients, count, height - tall + 1, width - wide + 1, out))


def _image_shape(gradients: Tensor, weights: Tensor) -> torch.Size:
    (clients, count, high, broad, _), (_, _, channels, tall, wide) = gradients.shape, weights.shape
    return torch.Size((clients, count, high + tall - 1, broad + wide - 1, channels))


def _weight_shape(gradients: Tensor, images: Tensor) -> torch.Size:
    (clients, _, high, broad, out), (_, _, height, width, channels) = gradients.shape, images.shape
    return torch.Size((clients, out, channels, height - high + 1, width - broad + 1))


def _gradients(v: Tensor, x: Tensor, w: Tensor, *wanted: bool) -> tuple[Tensor, ...]:
    v = v.contiguous()
    of_images, of_weights, of_bias = wanted
    return (
        _convolve_images(_split(v, w), w).view(_image_shape(v, w)) if of_images else _nothing(v),
        _convolve_weights(v, _split(x, v)) if of_weights else _nothing(v),
        # by PyTorch, which is several times as fast as a loop of the graph's compiler
        v.sum((1, 2, 3)) if of_bias else _nothing(v),
    )


def _gradients_like(v: Tensor, x: Tensor, w: Tensor, *wanted: bool) -> tuple[Tensor, ...]:
    shapes = _image_shape(v, w), _weight_shape(v, x), torch.Size((len(v), v.shape[-1]))
    pairs = zip(shapes, wanted, strict=True)
    return tuple(v.new_empty(shape) if needed else _nothing(v) for shape, needed in pairs)


def _split(values: Tensor, like: Tensor) -> Tensor:
    """Regroup the first two axes of a tensor so that the first is as long as that of ``like``."""
    return values.reshape(len(like), -1, *values.shape[2:])


def _nothing(v: Tensor) -> Tensor:
    return v.new_empty(len(v), 0)


def _rule_of_gradients(function: Callable[..., Any]) -> VmapRule:
    """Return the `vmap` rule of `convolve_gradients`; it does not copy weights that all clients share."""

    def rule(info: Any, axes: Any, v: Tensor, x: Tensor, *others: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if axes[2] is None and None not in axes[:2]:
            slopes = joined(v, axes[0], size, place=1)
            # laid out as in `along_first_or_second_axis`, so that a compiled graph writes them only once
            images = x.movedim(axes[1], 1).flatten(1, 2)
            if len(slopes) == len(images) * size:  # in one order
                found = function(slopes, images, *others)
                return tuple(part.unflatten(0, (-1, size)) for part in found), (1, 1, 1)
        return along_first_axis(function)(info, axes, v, x, *others)

    return rule


def _joint(wanted: Sequence[bool], v: Tensor, x: Tensor, w: Tensor, *_: Tensor) -> list[Any]:
    """Return a convolution's gradients for images, weights and any bias; None for those not required."""
    found = convolve_gradients(v, x, w, *(*wanted, False)[:3])
    return [slope if needed else None for slope, needed in zip(found, wanted, strict=False)]


def _slope_of_gradients(
    a: Tensor, b: Tensor, c: Tensor, v: Tensor, x: Tensor, w: Tensor, *wanted: bool
) -> Tensor:
    of_images, of_weights, of_bias = wanted
    parts = [convolve(_split(a, w), w).view_as(v)] if of_images else []
    parts += [convolve(_split(x, v), b)] if of_weights else []
    parts += [c[:, None, None, None].expand_as(v)] if of_bias else []
    return reduce(torch.add, parts)


# Each of three is linear in either factor, so that the gradients are again these.
convolve: Callable[..., Tensor] = operator(
    "convolve(Tensor images, Tensor weights) -> Tensor",
    _convolve,
    lambda x, w: x.new_empty(_output_shape(x, w)),
    along_first_or_second_axis,
    joint=_joint,
)
convolve_images: Callable[..., Tensor] = operator(
    "convolve_images(Tensor gradients, Tensor weights) -> Tensor",
    _convolve_images,
    lambda g, w: g.new_empty(_image_shape(g, w)),
    along_first_or_second_axis,
    lambda v, g, w: convolve(v, w),
    lambda v, g, w: convolve_weights(g, v),
)
convolve_weights: Callable[..., Tensor] = operator(
    "convolve_weights(Tensor gradients, Tensor images) -> Tensor",
    _convolve_weights,
    lambda g, x: x.new_empty(_weight_shape(g, x)),
    along_first_axis,
    lambda v, g, x: convolve(x, v),
    lambda v, g, x: convolve_images(g, v),
)
convolve_and_add: Callable[..., Tensor] = operator(
    "convolve_and_add(Tensor images, Tensor weights, Tensor bias) -> Tensor",
    _convolve,
    lambda x, w, b: x.new_empty(_output_shape(x, w)),
    along_first_or_second_axis,
    joint=_joint,
)
# One operator for all gradients: as several operators, a compiled graph would compute their input, e.g. the
# gradient of a ReLU, once for each. Gradients are those of each client in v. Neighbouring clients may share
# weights, of which there are fewer then, and images may be split among fewer or more clients.
convolve_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] = operator(
    "convolve_gradients(Tensor gradients, Tensor images, Tensor weights, "
    "bool of_images, bool of_weights, bool of_bias) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_like,
    _rule_of_gradients,
    _slope_of_gradients,
    lambda a, b, c, v, x, w, *wanted: convolve_images(v, b).view_as(x) if wanted[1] else None,
    lambda a, b, c, v, x, w, *wanted: (
        convolve_weights(_split(v, w), _split(a, w)) if wanted[0] else None
    ),
)
