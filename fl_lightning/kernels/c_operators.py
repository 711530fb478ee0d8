"""C functions as PyTorch operators that support `torch.func` and `torch.compile`.

`torch.library` registers an operator's name, its result shape for the compiler, and its `vmap` rule. Its
gradient is a separate `autograd.Function`, because `torch.func.grad` does not support gradients that are
registered with `torch.library`. Compiled graphs contain the operators only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fl_lightning", "DEF")

# (vmap info, mapped axis of each argument, *arguments) -> (results, mapped axis of each result)
VmapRule = Callable[..., tuple[Any, Any]]
# Makes the vmap rule of an operator.
VmapRuleOf = Callable[[Callable[..., Any]], VmapRule]


def operator(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    rule: VmapRuleOf,
    *gradients: Callable[..., Tensor | None] | None,
    joint: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Callable[..., Any]:
    """Register a C function as a PyTorch operator, with gradients of any order.

    Args:
        schema: name and arguments in the syntax of `torch.library`: tensors first, then numbers.
            Integer results have no gradients.
        compute: computes the operator on the CPU.
        fake: returns empty tensors with the shapes of the results.
        rule: rule for `vmap`.
        gradients: one function per tensor argument: (gradients of the floating-point results, integer
            results, arguments) -> gradient of the argument; None for an argument without gradient.
        joint: alternative to ``gradients``: (mask of required gradients, same arguments) -> gradients
            of all tensor arguments.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CPU")
    torch.library.register_fake(f"fl_lightning::{name}", fake, lib=_LIBRARY)
    # otherwise autocast would compute parts in another precision, where an operator calls PyTorch's own
    torch.library.register_autocast(f"fl_lightning::{name}", "cpu", torch.float32, lib=_LIBRARY)
    function: Callable[..., Any] = getattr(torch.ops.fl_lightning, name)
    torch.library.register_vmap(f"fl_lightning::{name}", rule(function), lib=_LIBRARY)
    return _differentiable(function, rule, gradients, joint)


def _differentiable(
    function: Callable[..., Any],
    rule: VmapRuleOf,
    gradients: Sequence[Callable[..., Tensor | None] | None],
    joint: Callable[..., Sequence[Tensor | None]] | None,
) -> Callable[..., Any]:
    """Return a registered operator with autograd support, see `operator`."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return function(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = output if isinstance(output, tuple) else (output,)
            ctx.has_gradient = [result.is_floating_point() for result in results]
            whole = [r for r, has in zip(results, ctx.has_gradient, strict=True) if not has]
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            ctx.mark_non_differentiable(*whole)
            ctx.save_for_backward(*whole, *tensors)
            ctx.numbers = inputs[len(tensors) :]

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
            of_results = compress(slopes, ctx.has_gradient)
            given = (*of_results, *ctx.saved_tensors, *ctx.numbers)
            count = len(ctx.needs_input_grad) - len(ctx.numbers)
            wanted = ctx.needs_input_grad[:count]
            if joint is not None:
                found = joint(wanted, *given)
            else:
                pairs = zip(wanted, gradients, strict=True)
                found = [of(*given) if needed and of else None for needed, of in pairs]
            return (*found, *(None for _ in ctx.numbers))

        @staticmethod
        def vmap(info: Any, axes: Any, *arguments: Any) -> tuple[Any, Any]:
            return rule(Differentiable.apply)(info, axes, *arguments)

    def apply(*arguments: Any) -> Any:
        return Differentiable.apply(*arguments)

    torch.compiler.allow_in_graph(apply)
    return apply


def along_first_axis(function: Callable[..., Any]) -> VmapRule:
    """Return the `vmap` rule of an operator that handles each entry of the first axis separately."""

    def rule(info: Any, axes: Any, *arguments: Any) -> tuple[Any, Any]:
        pairs = zip(arguments, axes, strict=True)
        flat = [joined(argument, axis, info.batch_size) for argument, axis in pairs]
        results = function(*flat)
        parts = results if isinstance(results, tuple) else (results,)
        split = tuple(part.unflatten(0, (info.batch_size, -1)) for part in parts)
        return (split, (0,) * len(split)) if isinstance(results, tuple) else (split[0], 0)

    return rule


def along_first_or_second_axis(function: Callable[..., Any]) -> VmapRule:
    """Return the `vmap` rule of an operator on tensors of shape (clients, examples, …).

    The mapped axis is merged into the axis over clients; if only the first argument has it, into the
    axis over examples: one large product instead of many small ones.
    """

    def rule(info: Any, axes: Any, one: Tensor, *others: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        if all(axis is None for axis in axes[1:]):
            result = function(one.movedim(axes[0], 1).flatten(1, 2), *others)
            return result.unflatten(1, (size, -1)), 1
        pairs = zip((one, *others), axes, strict=True)
        result = function(*(joined(argument, axis, size) for argument, axis in pairs))
        return result.unflatten(0, (size, -1)), 0

    return rule


def joined(argument: Any, axis: int | None, size: int, place: int = 0) -> Any:
    """Merge the axis that `vmap` maps over into the first axis of an argument.

    Args:
        argument: a tensor; other arguments are returned unchanged.
        axis: the mapped axis; None if it has none.
        size: length of the mapped axis.
        place: 0 if the mapped axis varies slowest in the merged one, 1 if the first axis does.

    Example:
        >>> joined(torch.zeros(2, 5, 3), axis=1, size=5).shape
        torch.Size([10, 3])
        >>> joined(torch.zeros(2, 3), axis=None, size=5).shape
        torch.Size([10, 3])
        >>> joined(torch.tensor([[0, 1], [2, 3]]), axis=0, size=2, place=1)
        tensor([0, 2, 1, 3])
    """
    if not isinstance(argument, Tensor):
        return argument
    if axis is None:
        shape = [-1] * (argument.ndim + 1)
        shape[place] = size
        argument = argument.unsqueeze(place).expand(shape)
    else:
        argument = argument.movedim(axis, place)
    return argument.flatten(0, 1)
