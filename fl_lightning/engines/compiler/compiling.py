"""One function of tensors, compiled as one graph, that never fails for want of a compiler."""

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
# As it writes what it finds in modules of PyTorch's and of ours
_FIXED = re.compile(
    r"(dict\(|list\(dict\.keys\()?(G\['__import_(torch|fl_lightning)(_dot_|')|__import__\('torch'\))"
)


class NotCompiled(UserWarning):
    """A function runs as it is, or in another way, because it cannot be compiled."""


class HasChanged(exc.TorchDynamoException):
    """No graph was made for the values that Python reads now."""


class Compiled:
    """A function compiled for fixed shapes; where that is impossible it runs as it is.

    That is so without a C++ compiler, and where a value that Python reads changes with every round
    (``self.current_epoch`` in a training step): each would need a graph of its own.

    Args:
        function: a method or function of tensors.
        name: of what it does, for a warning.
        is_alone: between two checks nothing changes but the tensors in the first argument, so that
            later calls check no more than that these are of kinds seen since.

    Attributes:
        is_given_up: whether it runs as it is from here on.
        plain: the function.

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
        # kinds of first arguments: of those with a graph, and of those that go to it unchecked
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
        """Make the next call check whether values that Python reads have changed.

        Args:
            refuse: whether it then raises `HasChanged`, having done nothing, until told otherwise;
                else it makes another graph. So it does for arguments of another kind, once a call
                has found that nothing else changed.
        """
        self._checked, self._refuses = [], refuse

    def __call__(self, *args: Any) -> Any:
        """Run the compiled step.

        Raises:
            HasChanged: if told to refuse changes; nothing is done then.
        """
        if not self.is_given_up:
            try:
                return self._run(*args)
            except _FAILURES as error:
                if self._refuses and isinstance(error, HasChanged):
                    raise
                if self._leaves_out and isinstance(error, exc.InternalTorchDynamoError):
                    # it cannot, where a step reads an array of NumPy's
                    self._compile(leaves_out=False)
                    return self(*args)
                self.give_up(error)
        return self.plain(*args)

    def give_up(self, error: Exception) -> None:
        """Run it as it is from here on, and warn."""
        self.is_given_up = True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # after a colon comes what the compiler's backend has raised
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).strip()
        # what the first line only names
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
        # what a first call changes (a counter, say) shows only in a second one
        if kind in self._made or not self._is_alone:
            self._checked.append(kind)
        if kind not in self._made:
            self._made.append(kind)
        return result

    def _as_compiled(self) -> AbstractContextManager[None]:
        """Make objects that Python holds part of the graph, instead of finding them in every call."""
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
    """Select the compiler's checks of values that may change between two calls.

    Two thirds are not: they are of the code of PyTorch and of this library.
    """
    return [_FIXED.match(entry.name) is None for entry in entries]


def _what_changed(error: RuntimeError) -> str:
    return f"what it reads has changed ({str(error).strip().splitlines()[-1].strip()})"


def _start_autograd() -> None:
    """Run a first backward pass, if there was none.

    That is when PyTorch starts a thread for every device, and a process with such threads cannot
    be forked. To the compiler even a machine without any seems to have eight of them.
    """
    torch.zeros((), requires_grad=True).backward()


def _start_no_processes() -> None:
    """Keep the compiler from starting processes for Triton where there is no GPU.

    They would import PyTorch, for seconds, on the cores that clients train on.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("TORCH_WARM_POOL", "0")


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
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


def kinds_of(value: Any) -> list[Any]:
    """Return types and shapes of the tensors in tuples, lists and dicts, and which are one and the same.

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
