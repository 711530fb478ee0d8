"""Dense layers of many clients, each with weights of its own, as one operator.

    y[g] = x[g] w[g]ᵀ        x (G, B, I),  w (G, O, I),  y (G, B, O)

At some ten examples PyTorch's batched matrix product on CPUs spends much of its time on laying out
factors anew. Here they are taken as they lie: `direct_linear.c`, see `c_library`. Products of more rows
and columns are PyTorch's. All is float32, on one thread, with I ≥ 8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fl_lightning.client.c_operators import along_first_axis, along_first_or_second_axis, operator
from fl_lightning.core.c_library import c_function

SOURCE = Path(__file__).with_name("direct_linear.c")
FLAGS = ("-ffp-contract=fast",)
FEWEST_INPUTS = 8  # a vector's
FEW = 64  # rows or columns; with more of both, PyTorch's product is the faster one
_TYPES = (*(ctypes.c_void_p,) * 3, *(ctypes.c_long,) * 4)


def _dense(inputs: Tensor, weights: Tensor) -> Tensor:
    clients, examples, size = inputs.shape
    out = weights.shape[1]
    if min(examples, out) > FEW:
        return inputs @ weights.mT
    result = inputs.new_empty(clients, examples, out)
    return _run("dense", result, inputs, weights, clients, examples, size, out)


def _dense_inputs(gradients: Tensor, weights: Tensor) -> Tensor:
    clients, examples, out = gradients.shape
    if min(examples, out) > FEW:
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
    """Have the library compute a result from two factors."""
    one, other = one.contiguous(), other.contiguous()
    function = c_function(SOURCE, FLAGS, name, *_TYPES)
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
