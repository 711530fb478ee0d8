"""Max-pooling with windows that do not overlap, as an operator.

    y[b, i, j] = max over u < t, v < w of x[b, i t + u, j w + v]      x (B, H, W, C), y (B, H/t, W/w, C)

Under `vmap` PyTorch's gradient of a pooling adds single numbers at computed indices. This takes a third
of a small network's step on a CPU. Windows that do not overlap need no additions. The source is
`window_maximum.c`, see `c_library`. Computation is in float32, on one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.kernels.c_library import c_function
from fl_lightning.kernels.c_operators import along_first_axis, operator

SOURCE = Path(__file__).parent / "c" / "window_maximum.c"


class _WindowShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("height", "width", "channels", "tall", "wide")]


_TYPES = (*(ctypes.c_void_p,) * 3, ctypes.c_long, _WindowShape)


def _small(images: Tensor, tall: int, wide: int) -> torch.Size:
    count, height, width, channels = images.shape
    return torch.Size((count, height // tall, width // wide, channels))


def _large(values: Tensor, tall: int, wide: int) -> torch.Size:
    count, height, width, channels = values.shape
    return torch.Size((count, height * tall, width * wide, channels))


def _maximum(images: Tensor, tall: int, wide: int) -> tuple[Tensor, Tensor]:
    maxima = images.new_empty(_small(images, tall, wide))
    which = torch.empty_like(maxima, dtype=torch.int32)
    _run("window_maximum", maxima, which, images.contiguous(), images.shape, (tall, wide))
    return maxima, which


def _pick(images: Tensor, which: Tensor, tall: int, wide: int) -> Tensor:
    result = images.new_empty(which.shape)
    tensors = result, images.contiguous(), which.contiguous()
    _run("window_pick", *tensors, images.shape, (tall, wide))
    return result


def _place(values: Tensor, which: Tensor, tall: int, wide: int) -> Tensor:
    result = values.new_empty(_large(values, tall, wide))
    tensors = result, values.contiguous(), which.contiguous()
    _run("window_place", *tensors, result.shape, (tall, wide))
    return result


def _run(
    name: str, one: Tensor, two: Tensor, three: Tensor, images: torch.Size, window: tuple[int, int]
) -> None:
    count, height, width, channels = images
    pointers = (one.data_ptr(), two.data_ptr(), three.data_ptr())
    shape = _WindowShape(height, width, channels, *window)
    c_function(SOURCE, (), name, *_TYPES)(*pointers, count, shape)


def _maximum_like(images: Tensor, tall: int, wide: int) -> tuple[Tensor, Tensor]:
    shape = _small(images, tall, wide)
    return images.new_empty(shape), images.new_empty(shape, dtype=torch.int32)


# Returns the maxima, and the index of each in its window.
window_maximum: Callable[..., tuple[Tensor, Tensor]] = operator(
    "window_maximum(Tensor images, int tall, int wide) -> (Tensor, Tensor)",
    _maximum,
    _maximum_like,
    along_first_axis,
    lambda v, which, x, tall, wide: window_place(v, which, tall, wide),
)
window_pick: Callable[..., Tensor] = operator(
    "window_pick(Tensor images, Tensor which, int tall, int wide) -> Tensor",
    _pick,
    lambda x, which, tall, wide: x.new_empty(which.shape),
    along_first_axis,
    lambda v, x, which, tall, wide: window_place(v, which, tall, wide),
    None,
)
window_place: Callable[..., Tensor] = operator(
    "window_place(Tensor values, Tensor which, int tall, int wide) -> Tensor",
    _place,
    lambda v, which, tall, wide: v.new_empty(_large(v, tall, wide)),
    along_first_axis,
    lambda v, g, which, tall, wide: window_pick(v, which, tall, wide),
    None,
)
