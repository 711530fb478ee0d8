"""Dense layers of many clients, each with weights of its own, as one operator.

    y[g] = x[g] w[g]ᵀ        x (G, B, I),  w (G, O, I),  y (G, B, O)

At some ten examples PyTorch's batched matrix product on CPUs spends much of its time on laying out
factors anew. Here they are taken as they lie: `direct_linear.c`, see `c_library`; only weights that some
hundred examples share are laid out anew, once. Products of more rows and columns are PyTorch's. All is
float32, on one thread, with I ≥ 8.

`dense_step` takes SGD's step on the weights without writing their gradients vᵀ x out, `dense_fold` has
a mean take steps in without writing them out.
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
_FOLD_TYPES = (*(ctypes.c_void_p,) * 5, *(ctypes.c_long,) * 4)
_STEP_TYPES = (*(ctypes.c_void_p,) * 5, *(ctypes.c_long,) * 6, *(ctypes.c_float,) * 4)


@cache
def flags(num_inputs: int) -> tuple[str, ...]:
    """Return the compiler's for layers of so many inputs, which fill a vector at least."""
    # -O3 would take twice as long to compile, and make nothing faster
    return ("-ffp-contract=fast", "-O2", *vector_flags(num_inputs if num_inputs >= 16 else 8))


@cache
def _has_own_products() -> bool:
    """Return whether PyTorch's library is that of the processor's maker: its products are faster here.

    Not so products with weights that are read along their rows, if those fill a cache.
    """
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
    """Compute a result from two factors by the C library."""
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


def can_step(weight: Tensor) -> bool:
    """True if `dense_step` can move a weight, shape (O, I), on a CPU."""
    is_long = weight.shape[1] >= FEWEST_INPUTS  # a row, for a vector
    return is_long and weight.dtype == torch.float32 and weight.is_contiguous()


def dense_step(
    to: Tensor,
    velocity: Tensor | None,
    weights: Tensor,
    errors: Tensor,
    inputs: Tensor,
    *,
    keep: float,
    lr: float,
    momentum: float,
    decay: float,
) -> None:
    """Step of SGD with the gradients errorsᵀ inputs, which are not stored.

        g = errorsᵀ inputs + decay · weights + momentum · velocity
        velocity ← g,    to ← keep · weights - lr · g

    Args:
        to: where the result goes, shape (G, O, I); its last two axes lie side by side. May be
            ``weights``.
        velocity: shape (G, O, I), contiguous; None without one, which is for momentum 0. With momentum
            0 what it held does not matter.
        weights: shape (G, O, I), or (1, O, I) if all clients have the same.
        errors: dL/dy, shape (G, B, O).
        inputs: shape (G, B, I).
        keep: 1 for new weights, 0 for how they move.
        lr: learning rate.
        momentum: μ.
        decay: λ.

    Example:
        >>> weights, errors, inputs = torch.zeros(1, 2, 8), torch.ones(1, 3, 2), torch.ones(1, 3, 8)
        >>> options = {"keep": 1.0, "lr": 0.5, "momentum": 0.0, "decay": 0.0}
        >>> dense_step(weights, None, weights, errors, inputs, **options)
        >>> weights.unique()
        tensor([-1.5000])

    Raises:
        TypeError: if a tensor is not of float32.
    """
    _check_types("dense_step", to, velocity, weights, errors, inputs)
    errors, inputs = errors.contiguous(), inputs.contiguous()
    clients, examples, out = errors.shape
    c_function(SOURCE, flags(inputs.shape[2]), "dense_step", *_STEP_TYPES)(
        to.data_ptr(),
        None if velocity is None else velocity.data_ptr(),
        weights.data_ptr(),
        errors.data_ptr(),
        inputs.data_ptr(),
        to.stride(0),
        weights.stride(0) if len(weights) == clients else 0,
        clients,
        examples,
        inputs.shape[2],
        out,
        keep,
        lr,
        momentum,
        decay,
    )


def dense_fold(mean: Tensor, errors: Tensor, inputs: Tensor, shares: Tensor) -> Tensor:
    """Fold products into a mean, one after the other, without storing them.

        mean ← lerp(mean, errorsᵀ inputs, share)

    bit-identical to `torch.lerp` with the products of `dense_step`.

    Args:
        mean: shape (O, I), contiguous.
        errors: shape (G, B, O).
        inputs: shape (G, B, I).
        shares: of each product, in [0, 1], shape (G,).

    Returns:
        The sum of the squares of each product's numbers, shape (G,).

    Example:
        >>> mean = torch.zeros(2, 8)
        >>> dense_fold(mean, torch.ones(1, 3, 2), torch.ones(1, 3, 8), torch.tensor([0.5]))
        tensor([144.])
        >>> mean.unique()
        tensor([1.5000])

    Raises:
        TypeError: if a tensor is not of float32.
    """
    _check_types("dense_fold", mean, errors, inputs, shares)
    errors, inputs, shares = errors.contiguous(), inputs.contiguous(), shares.contiguous()
    clients, examples, out = errors.shape
    assert mean.is_contiguous()
    assert len(shares) == clients
    squares = torch.empty_like(shares)
    c_function(SOURCE, flags(inputs.shape[2]), "dense_fold", *_FOLD_TYPES)(
        mean.data_ptr(),
        errors.data_ptr(),
        inputs.data_ptr(),
        shares.data_ptr(),
        squares.data_ptr(),
        clients,
        examples,
        inputs.shape[2],
        out,
    )
    return squares


def _check_types(name: str, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name} is for float32, got {tensor.dtype}")
