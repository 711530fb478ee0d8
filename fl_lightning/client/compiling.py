"""One function of tensors, compiled as one graph, that never fails for want of a compiler."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import exc

# the name of the second is newer than the oldest PyTorch supported
_FAILURES = (
    exc.TorchDynamoException,
    getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException),
)


class Compiled:
    """A function compiled for fixed shapes; where that is impossible it runs as it is.

    That is so without a C++ compiler, and where a value that Python reads changes with every round
    (``self.current_epoch`` in a training step): each would need a graph of its own.

    Args:
        function: a method or function of tensors.

    Example:
        >>> twice = Compiled(lambda x: 2 * x)
        >>> twice.is_given_up
        False
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        _start_autograd()
        self._plain = function
        self._compiled = torch.compile(_with_own_code(function), fullgraph=True, dynamic=False)
        self.is_given_up = False
        self._is_checked = False

    def recheck(self) -> None:
        """Have the next call find out whether what Python reads has changed."""
        self._is_checked = False

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if not self.is_given_up:
            try:
                if self._is_checked:
                    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                        return self._compiled(*args)
                self._is_checked = True
                return self._compiled(*args)
            except _FAILURES as error:
                self.is_given_up = True
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                warnings.warn(
                    f"the local step of many clients is not compiled from here on: {reason}",
                    stacklevel=2,
                )
        return self._plain(*args)


def _start_autograd() -> None:
    """Run a first backward pass, if there was none.

    That is when PyTorch starts a thread for every device, and a process with such threads cannot
    be forked. To the compiler even a machine without any seems to have eight of them.
    """
    torch.zeros((), requires_grad=True).backward()


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object that no other shares.

    The compiler keeps its graphs at the code object, at most eight of them: several engines in one
    process, e.g. in a notebook, would take them from each other.
    """
    plain = getattr(function, "__func__", function)
    copy = types.FunctionType(
        plain.__code__.replace(),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    owner = getattr(function, "__self__", None)
    return copy if owner is None else types.MethodType(copy, owner)
