"""Cost of a module for one example, counted by running it.

    flops        multiply-adds of convolutions, products of matrices and attention, and their biases
    params       numbers that are trained or frozen, each once
    activations  numbers that layers put out: what a training step keeps per example

Multiply-adds are counted once, and batch norm, activations and pools not at all: the convention of
NAS-Bench-201's tables and of most papers (theirs say FLOPs, as we do).
Source: `torch.utils.flop_counter`, which counts a multiply-add as two operations and leaves biases
out. It also does not see into `nn.MultiheadAttention` where that runs as one fused operator: the
fused path is switched off while we count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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


@dataclass(frozen=True)
class Cost:
    """Cost of one example.

    Attributes:
        flops: multiply-adds.
        params: numbers.
        activations: numbers; four bytes each in float32.
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
    """Count the cost of a module for its inputs; for one example, pass a batch of one.

    The module is run once, in evaluation mode and without gradients; it is left as it was.

    Args:
        module: any.
        inputs: of its `forward`, on the module's device; on ``meta`` nothing is computed. Of more
            examples than one, the biases inside `nn.MultiheadAttention` may not be counted.

    Example:
        >>> count(nn.Linear(4, 3), torch.zeros(1, 4))
        Cost(flops=15, params=15, activations=3)
    """
    return _counted(module, *inputs)[0]


def _counted(module: nn.Module, *inputs: Any) -> tuple[Cost, Any]:
    """Return the cost of a module, and its outputs."""
    counter = FlopCounterMode(display=False, custom_mapping=_COUNTS)
    exactly = (
        _ContiguousLinear(),
        _unfused_attention(),
        _evaluating(module),
        torch.no_grad(),
        counter,
    )
    with ExitStack() as stack:
        sizes = stack.enter_context(_outputs())
        for context in exactly:
            stack.enter_context(context)
        outputs = module(*inputs)
    params = sum(parameter.numel() for parameter in module.parameters())
    return Cost(counter.get_total_flops() // 2, params, sum(sizes)), outputs


def _convolution(
    x: Any, weight: Any, bias: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    transposed = args[3]
    flops: int = conv_flop_count(x, weight, out_shape, transposed)
    return flops + (2 * math.prod(out_shape) if bias is not None else 0)


def _product_and_bias(bias: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Of (…, n, k) by (…, k, m)."""
    product = 2 * math.prod(left) * right[-1]
    added = 2 * math.prod(left[:-1]) * right[-1]
    return int(product + added)


# twice what we mean: the counter counts multiplications and additions, and is halved at the end
_aten = torch.ops.aten
_COUNTS = {
    _aten.convolution: _convolution,
    _aten.addmm: _product_and_bias,
    _aten.baddbmm: _product_and_bias,
}


class _ContiguousLinear(TorchFunctionMode):
    """Linear layer on contiguous inputs: for transposed ones PyTorch adds the bias in a step of its own, uncounted."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block: no dropout, and batch norm accepts one example."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


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
    """Collect the numbers that layers put out: modules that call no other one.

    What shares memory with an input (an identity, a view) is no new number. A module of several
    that computes by itself, such as attention, counts if there are parameters in it: a sum of what
    comes in is no layer.
    """
    sizes: list[int] = []
    called: list[bool] = []  # for every module that runs: has it called another one

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


# makes a module, with its arguments
Piece = tuple[Callable[..., nn.Module], *tuple[Any, ...]]


def chain_cost(pieces: Iterable[Piece], shape: Sequence[int]) -> Cost:
    """Cost of modules that run one after the other; each different one is counted once in a process.

    Args:
        pieces: what makes each module, and its arguments, which are hashable.
        shape: of one example that the first gets.
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
    """Return the cost of a module, and the shape of its output for one example."""
    with torch.device("meta"):
        cost, output = _counted(make(*arguments), torch.empty(1, *shape))
    return cost, tuple(output.shape[1:])
