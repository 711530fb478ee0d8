"""A function of tensors compiled as one graph; without a compiler it runs uncompiled."""

from __future__ import annotations

import os
import re
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import exc

_FAILURES = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
# How the compiler names values that it finds in modules of PyTorch or of this package
_FIXED = re.compile(
    r"(dict\(|list\(dict\.keys\()?(G\['__import_(torch|fl_lightning)(_dot_|')|__import__\('torch'\))"
)


class NotCompiled(UserWarning):
    """Warning that a function runs uncompiled, because the compiler failed."""


class HasChanged(exc.TorchDynamoException):
    """Raised if a Python value that a compiled function depends on has changed since compilation."""


class Compiled:
    """A function compiled for fixed shapes; it runs uncompiled if compiling fails.

    Compiling fails without a C++ compiler. It also fails if the function reads a Python value that
    changes every round (``self.current_epoch`` in a training step): each value needs its own graph.

    Args:
        function: a method or function of tensors.
        name: description of the function, for warnings.
        is_alone: promises that between two calls of `recheck` only the tensors in the first argument
            change. Later calls then check only the types and shapes of these tensors.

    Attributes:
        is_given_up: True if the function runs uncompiled from now on.
        plain: the uncompiled function.

    Example:
        >>> twice = Compiled(lambda x: 2 * x)
        >>> twice.is_given_up
        False
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "the local step of many clients",
        *,
        is_alone: bool = False,
    ) -> None:
        _start_autograd()
        _start_no_processes()
        self._name, self.plain = name, function
        self._is_alone = is_alone
        # types and shapes of first arguments: those with a graph, and those that it takes unchecked
        self._made: list[Any] = []
        self._checked: list[Any] = []
        self.is_given_up = self._refuses = False
        self._compile(leaves_out=True)

    def _compile(self, *, leaves_out: bool) -> None:
        self._leaves_out = leaves_out
        self._made, self._checked = [], []
        self._compiled = torch.compile(
            with_own_code(self.plain),
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": _checks} if leaves_out else None,
        )

    def recheck(self, *, refuse: bool = False) -> None:
        """Make the next call check whether Python values that the function reads have changed.

        Args:
            refuse: if True, later calls raise `HasChanged` and do nothing where a value has changed;
                if False, they compile another graph. Once a call has found nothing changed,
                arguments of new types or shapes always get another graph.
        """
        self._checked, self._refuses = [], refuse

    def __call__(self, *args: Any) -> Any:
        """Run the function, compiled if possible.

        Raises:
            HasChanged: instead of running, if a Python value has changed and `recheck` refuses that.
        """
        if not self.is_given_up:
            try:
                return self._run(*args)
            except _FAILURES as error:
                if self._refuses and isinstance(error, HasChanged):
                    raise
                if self._leaves_out and isinstance(error, exc.InternalTorchDynamoError):
                    # the compiler cannot filter its checks if the step reads a NumPy array
                    self._compile(leaves_out=False)
                    return self(*args)
                self.give_up(error)
        return self.plain(*args)

    def give_up(self, error: Exception) -> None:
        """Run the function uncompiled from now on, and warn."""
        self.is_given_up = True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # after a colon comes the error of the compiler's backend
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).strip()
        # the explanation of an error that the first line only names
        more = [line.strip() for line in lines if line.strip().startswith("Explanation: ")]
        reason = "; ".join([reason, *(line.removeprefix("Explanation: ") for line in more[:1])])
        message = f"{self._name} is not compiled from here on: {reason}"
        warnings.warn(message, NotCompiled, stacklevel=3)

    def _run(self, *args: Any) -> Any:
        kind = kinds_of(args[0]) if self._is_alone else None
        if kind in self._checked:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                return self._compiled(*args)
        is_new = bool(self._checked) and kind not in self._made  # e.g. batches of another size
        if self._refuses and not is_new:
            result = self._run_unchanged(*args)
            self._checked.append(kind)
            return result
        with self._as_compiled():
            result = self._compiled(*args)
        # a change that the first call makes (to a counter, say) shows only in the second call
        if kind in self._made or not self._is_alone:
            self._checked.append(kind)
        if kind not in self._made:
            self._made.append(kind)
        return result

    def _as_compiled(self) -> AbstractContextManager[None]:
        """Compile Python objects into the graph, instead of looking them up in every call."""
        patched: AbstractContextManager[None] = torch._dynamo.config.patch(
            install_free_tensors=self._is_alone
        )
        return patched

    def _run_unchanged(self, *args: Any) -> Any:
        if not self._made:
            raise HasChanged("it has no graph yet")
        with self._as_compiled(), torch.compiler.set_stance("fail_on_recompile"):
            try:
                return self._compiled(*args)
            except RuntimeError as error:
                if "recompile" not in str(error):
                    raise
                raise HasChanged(_what_changed(error)) from error


def _checks(entries: Sequence[Any]) -> list[bool]:
    """Select, among the compiler's guards, those of values that may change between two calls.

    Two thirds of its checks are of the code of PyTorch and of this package, which does not change.
    """
    return [_FIXED.match(entry.name) is None for entry in entries]


def _what_changed(error: RuntimeError) -> str:
    return f"what it reads has changed ({str(error).strip().splitlines()[-1].strip()})"


def _start_autograd() -> None:
    """Run a first backward pass outside the compiler, so that PyTorch starts its threads here.

    At the first backward pass PyTorch starts a thread per device, and a process with such threads
    cannot be forked. Inside the compiler even a machine without a GPU seems to have eight devices.
    """
    torch.zeros((), requires_grad=True).backward()


def _start_no_processes() -> None:
    """Keep the compiler from starting processes for Triton where there is no GPU.

    These processes import PyTorch, for seconds, on the cores that clients train on.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("TORCH_WARM_POOL", "0")


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with its own code object, so that the compiler stores its graphs separately.

    The compiler stores at most eight graphs per code object. Several engines in one process, e.g. in
    a notebook, would otherwise replace each other's graphs.
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


def kinds_of(value: Any) -> list[Any]:
    """Return types and shapes of the tensors in nested containers, and which entries are the same tensor.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(2), torch.ones(2)
        >>> kinds_of([x, y]) == kinds_of([y, x]), kinds_of([x, y]) == kinds_of([x, x])
        (True, False)
    """
    found: list[Any] = []
    _note(value, found, {})
    return found


def _note(value: Any, found: list[Any], number_of: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        number = number_of.setdefault(id(value), len(number_of))
        found.append((value.dtype, value.shape, number))
    elif isinstance(value, dict):
        found.append(tuple(value))
        for part in value.values():
            _note(part, found, number_of)
    elif isinstance(value, (tuple, list)):
        found.append(len(value))
        for part in value:
            _note(part, found, number_of)
    else:
        found.append(type(value))
