"""SGD step on the active entries of a tensor in one pass over memory, by a C kernel.

    m ← μ m + (1 - τ)(g + λ p),   p ← p - η m        at p[active], g[active]

PyTorch's operations need separate passes to read values, read gradients and write values. Together they
take longer than a dense step of all entries. The kernel is in `masked_sgd_step.c`, see `c_library`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.kernels.c_library import c_function, c_library

SOURCE = Path(__file__).parent / "c" / "masked_sgd_step.c"
_NAMES = {torch.float32: "sgd_float32", torch.float64: "sgd_float64"}
_FLAG, _NUMBERS = ctypes.c_int, [ctypes.c_double] * 4
_TYPES = (*[ctypes.c_void_p] * 4, ctypes.c_int64, *_NUMBERS, _FLAG, _FLAG)


def sgd_in_one_pass(
    param: Tensor, active: Tensor, buffer: Tensor | None, group: dict[str, Any]
) -> bool:
    """Move the trainable entries of a masked parameter by one step, as `torch.optim.SGD` would.

    Results are bit-identical to PyTorch's, but for the last entries of a tensor that do not fill a
    register: PyTorch rounds these once more.

    Args:
        param: parameter with a gradient.
        active: indices of the active entries in the flat parameter, shape (k,), int64.
        buffer: momentum of the active entries, shape (k,), or None without momentum.
        group: options of `torch.optim.SGD`.

    Returns:
        True if the step was taken: on a CPU, for float32 and float64 in row-major order.

    Example:
        >>> p = torch.tensor([1.0, 2.0])
        >>> p.grad = torch.tensor([0.5, 0.5])
        >>> options = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
        >>> options |= {"nesterov": False, "maximize": False}
        >>> if sgd_in_one_pass(p, torch.tensor([1]), None, options):
        ...     assert p.tolist() == [1.0, 1.5]
    """
    grad = param.grad
    if grad is None or isinstance(group["lr"], Tensor) or not _fit(param, grad, active, buffer):
        return False
    if param.dtype not in _NAMES or c_library(SOURCE) is None:
        return False
    c_function(SOURCE, (), _NAMES[param.dtype], *_TYPES)(
        param.data_ptr(),
        grad.data_ptr(),
        active.data_ptr(),
        None if buffer is None else buffer.data_ptr(),
        len(active),
        group["lr"],
        group["momentum"],
        group["dampening"],
        group["weight_decay"],
        group["nesterov"],
        group["maximize"],
    )
    torch.autograd.graph.increment_version(param)
    return True


def _fit(param: Tensor, grad: Tensor, active: Tensor, buffer: Tensor | None) -> bool:
    """True if the C function supports the memory layout and dtype of all these tensors."""
    size, count = param.numel(), active.numel()
    return (
        _is_plain(param)
        and _is_plain(grad)
        and _is_plain(active)
        and grad.dtype == param.dtype
        and grad.numel() == size
        and active.dtype == torch.int64
        # indices increase: a tensor that was exchanged for a smaller one is left to torch's errors
        and (count == 0 or int(active[-1]) < size)
        and (buffer is None or _is_plain(buffer))
        and (buffer is None or (buffer.dtype == param.dtype and buffer.numel() == count))
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)  # others may have no memory of their own
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
    )
