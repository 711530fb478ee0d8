"""Optimizers of any kind: what is inside of them, and whether their step wants a closure.

Optimizers that are not torch's own may hold another one (SAM, Lookahead), which has options and
state too, and may evaluate the loss more than once, for which they ask for a closure. Some say so
in the signature of ``step``, others fail without one: so each that can take a closure is given
one, as Lightning does. torch's own optimizers but LBFGS, and our masked ones, need none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

# Called before a step with the optimizer and the step's arguments, of which it may return others.
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def and_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that it holds, each once, itself first.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> outer = torch.optim.SGD([weight], lr=0.1)
        >>> outer.base = torch.optim.Adam([weight])
        >>> [type(each).__name__ for each in and_inner(outer)]
        ['SGD', 'Adam']
    """
    found = [optimizer]
    for each in found:  # grows meanwhile
        values = vars(each).values()
        found += [v for v in values if isinstance(v, Optimizer) and all(v is not f for f in found)]
    return found


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step is one of `torch.optim`."""
    step: Any = optimizer.step
    return str(getattr(step, "__module__", "")).startswith("torch.optim")


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether a step is to be given a closure that computes loss and gradients.

    Example:
        >>> weights = [torch.nn.Parameter(torch.ones(1))]
        >>> takes_closure(torch.optim.SGD(weights, lr=0.1)), takes_closure(LBFGS(weights))
        (False, True)
    """
    if isinstance(optimizer, LBFGS):
        return True
    if is_torchs(optimizer) or isinstance(optimizer, MaskedOptimizer):
        return False
    parameters = inspect.signature(optimizer.step).parameters
    return "closure" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step without a closure is known to fail."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def stepped_with_closure(
    optimizer: Optimizer, gradients: Callable[[], Tensor | None]
) -> Tensor | None:
    """Step an optimizer that takes a closure, and return the loss that it found last.

    Args:
        optimizer: evaluates the closure as often as it likes.
        gradients: computes them anew and returns the loss; None if there is none.
    """
    found: list[Tensor | None] = [None]

    @torch.enable_grad()
    def closure() -> Tensor | None:
        found[0] = gradients()
        return found[0]

    optimizer.step(closure=closure)  # type: ignore[arg-type]
    return found[0]


class OutermostSteps:
    """Calls back at the steps of optimizers, inside a ``with`` block.

    A step that an inner optimizer takes inside one of its outer one is part of that; one that it
    takes by itself counts as the outer one's.

    Args:
        optimizers: the outer ones.
        before: what to do before a step, given the outer optimizer; see `Before`.
        after: what to do after a step, given the outer optimizer.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        before: Before | None = None,
        after: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._outer = {each: outer for outer in optimizers for each in and_inner(outer)}
        self._before, self._after = before, after
        is_nested = any(each is not outer for each, outer in self._outer.items())
        self._sees_begin = is_nested or before is not None  # a hook costs a microsecond
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth = 0
        self._handles = [each.register_step_post_hook(self._end) for each in self._outer]
        if self._sees_begin:
            self._handles += [each.register_step_pre_hook(self._begin) for each in self._outer]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._before is None or self._depth > 1:
            return None
        return self._before(self._outer[optimizer], args, kwargs)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= self._sees_begin
        if self._after is not None and self._depth == 0:
            self._after(self._outer[optimizer])
