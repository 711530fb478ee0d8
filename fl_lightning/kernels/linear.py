"""Dense layers of many clients, each with its own weights, as one operator.

    y[g] = x[g] w[g]ᵀ        x (G, B, I),  w (G, O, I),  y (G, B, O)

With ten examples PyTorch's batched matrix product on CPUs spends much of its time on copying factors to
another layout. `direct_linear.c` (see `c_library`) multiplies them in place; it copies weights, once,
only if a hundred examples share them. Larger products use PyTorch. Computation is in float32, on one
thread, with I ≥ 8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.kernels.c_library import c_function, vector_flags
from fl_lightning.kernels.c_operators import along_first_axis, along_first_or_second_axis, operator

SOURCE = Path(__file__).parent / "c" / "direct_linear.c"
FEWEST_INPUTS = 8  # a vector's
FEW = 64  # rows or columns; with more of both, PyTorch's product is the faster one
_TYPES = (*(ctypes.c_void_p,) * 3, *(ctypes.c_long,) * 4)


@cache
def flags(num_inputs: int) -> tuple[str, ...]:
    """Return compiler flags for C loops over ``num_inputs`` inputs of a linear layer."""
    # -O3 would take twice as long to compile, and make nothing faster
    return ("-ffp-contract=fast", "-O2", *vector_flags(num_inputs if num_inputs >= 16 else 8))


@cache
def _has_own_products() -> bool:
    """True if PyTorch uses Intel's matrix library, which computes gradients of inputs faster than the C file."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # of newer versions
    is_intel = str(capabilities.get("cpu_name", "")).startswith("Intel")
    return is_intel and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _dense(inputs: Tensor, weights: Tensor) -> Tensor:
    clients, examples, size = inputs.shape
    out = weights.shape[1]
    if min(examples, out) > FEW:
        return inputs @ weights.mT
    result = inputs.new_empty(clients, examples, out)
    return _run("dense", result, inputs, weights, clients, examples, size, out)


def _dense_inputs(gradients: Tensor, weights: Tensor) -> Tensor:
    clients, examples, out = gradients.shape
    if min(examples, out) > FEW or _has_own_products():
        return gradients @ weights
    size = weights.shape[2]
    result = gradients.new_empty(clients, examples, size)
    return _run("dense_inputs", result, gradients, weights, clients, examples, size, out)


def _dense_weights(gradients: Tensor, inputs: Tensor) -> Tensor:
    clients, examples, out = gradients.shape
    if examples > FEW:
        return gradients.mT @ inputs
    size = inputs.shape[2]
    result = inputs.new_empty(clients, out, size)
    return _run("dense_weights", result, gradients, inputs, clients, examples, size, out)


def _run(name: str, result: Tensor, one: Tensor, other: Tensor, *sizes: int) -> Tensor:
    """Call the C library for a product of two matrices per client."""
    one, other = one.contiguous(), other.contiguous()
    function = c_function(SOURCE, flags(sizes[2]), name, *_TYPES)
    function(result.data_ptr(), one.data_ptr(), other.data_ptr(), *sizes)
    return result


# Each is linear in either factor, so that the gradients are again these three.
dense: Callable[..., Tensor] = operator(
    "dense(Tensor inputs, Tensor weights) -> Tensor",
    _dense,
    lambda x, w: x.new_empty(*x.shape[:2], w.shape[1]),
    along_first_or_second_axis,
    lambda v, x, w: dense_inputs(v, w),
    lambda v, x, w: dense_weights(v, x),
)
dense_inputs: Callable[..., Tensor] = operator(
    "dense_inputs(Tensor gradients, Tensor weights) -> Tensor",
    _dense_inputs,
    lambda v, w: v.new_empty(*v.shape[:2], w.shape[2]),
    along_first_or_second_axis,
    lambda u, v, w: dense(u, w),
    lambda u, v, w: dense_weights(v, u),
)
dense_weights: Callable[..., Tensor] = operator(
    "dense_weights(Tensor gradients, Tensor inputs) -> Tensor",
    _dense_weights,
    lambda v, x: x.new_empty(len(x), v.shape[2], x.shape[2]),
    along_first_axis,
    lambda u, v, x: dense(x, u),
    lambda u, v, x: dense_inputs(v, u),
)
