"""Cost of a module for one example, counted by running it.

    flops        multiply-adds of convolutions, matrix products and attention, plus their biases
    params       number of parameters, trained or frozen
    activations  number of values in the outputs of layers, which training keeps per example

A multiply-add counts once; batch norm, activation functions and pools do not count. This is the convention
of NAS-Bench-201 and of most papers, which call the number FLOPs.
Source: `torch.utils.flop_counter`, which counts a multiply-add as two operations, and no biases. It cannot count
the fused path of `nn.MultiheadAttention`, which is switched off meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from fl_lightning.core.modules import modes_kept

Measure = Literal["flops", "params", "activations"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class Cost:
    """Cost of a module for one example: multiply-adds, parameters and activations.

    Attributes:
        flops: number of multiply-adds.
        params: number of parameters.
        activations: number of values in layer outputs; four bytes each in float32.
    """

    flops: int
    params: int
    activations: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.params + other.params,
            self.activations + other.activations,
        )


def count(module: nn.Module, *inputs: Any) -> Cost:
    """Count a module's cost on given inputs; a batch of one gives the cost per example.

    The module runs once, in evaluation mode without gradients, and does not change.

    Args:
        module: module to count.
        inputs: inputs of the module's `forward`, on its device; on ``meta`` nothing is computed. For
            batches of several examples biases inside `nn.MultiheadAttention` may not be counted.

    Example:
        >>> count(nn.Linear(4, 3), torch.zeros(1, 4))
        Cost(flops=15, params=15, activations=3)
    """
    return _counted(module, *inputs)[0]


def _counted(module: nn.Module, *inputs: Any) -> tuple[Cost, Any]:
    counter = FlopCounterMode(display=False, custom_mapping=_COUNTS)
    exactly = (
        _ContiguousLinear(),
        _unfused_attention(),
        modes_kept(module),
        torch.no_grad(),
        counter,
    )
    with ExitStack() as stack:
        sizes = stack.enter_context(_outputs())
        for context in exactly:
            stack.enter_context(context)
        outputs = module.eval()(*inputs)  # batch norm then accepts one example
    params = sum(parameter.numel() for parameter in module.parameters())
    return Cost(counter.get_total_flops() // 2, params, sum(sizes)), outputs


def _convolution(
    x: Any, weight: Any, bias: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    transposed = args[3]
    flops: int = conv_flop_count(x, weight, out_shape, transposed)
    return flops + (2 * math.prod(out_shape) if bias is not None else 0)


def _product_and_bias(bias: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Return twice the multiply-adds of a product (…, n, k) by (…, k, m), plus twice the additions of its bias."""
    product = 2 * math.prod(left) * right[-1]
    added = 2 * math.prod(left[:-1]) * right[-1]
    return int(product + added)


# twice the multiply-adds, as everywhere in the counter; the total is halved at the end
_aten = torch.ops.aten
_COUNTS = {
    _aten.convolution: _convolution,
    _aten.addmm: _product_and_bias,
    _aten.baddbmm: _product_and_bias,
}


class _ContiguousLinear(TorchFunctionMode):
    """Function mode that makes inputs of linear layers contiguous; otherwise PyTorch adds the bias uncounted."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _unfused_attention() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _outputs() -> Iterator[list[int]]:
    """Return a context that collects output sizes of layers, i.e. of modules that call no other module.

    An output that shares memory with an input (an identity, a view) is not counted. A module with
    children that it does not call, such as attention, is a layer if it has parameters.
    """
    sizes: list[int] = []
    called: list[bool] = []  # whether each of the running modules has called another one

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if called:
            called[-1] = True
        called.append(False)

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls_others = called.pop()
        composed = next(module.children(), None) is not None
        if calls_others or (composed and next(module.parameters(), None) is None):
            return
        known = {_memory(tensor) for tensor in _tensors(inputs)}
        sizes.extend(t.numel() for t in _tensors(output) if _memory(t) not in known)

    # MultiheadAttention looks for hooks, and does not use its fused path if there are any
    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# constructor of a module, its arguments
Piece = tuple[Callable[..., nn.Module], *tuple[Any, ...]]


def chain_cost(pieces: Iterable[Piece], shape: Sequence[int]) -> Cost:
    """Return the total cost of modules that run in sequence; equal modules are counted once and cached.

    Args:
        pieces: constructor of each module with hashable arguments.
        shape: shape of one input example of the first module.
    """
    total, here = Cost(0, 0, 0), tuple(shape)
    for make, *arguments in pieces:
        cost, here = _piece_cost(make, tuple(arguments), here)
        total += cost
    return total


@lru_cache(maxsize=10_000)
def _piece_cost(
    make: Callable[..., nn.Module], arguments: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Cost, tuple[int, ...]]:
    """Return a module's cost and its output's shape, both for one example."""
    with torch.device("meta"):
        cost, output = _counted(make(*arguments), torch.empty(1, *shape))
    return cost, tuple(output.shape[1:])
