"""A user's ``training_step`` as a function: tensors in, loss and logged values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = dict[str, Tensor]
# Among logged values the name of the loss itself, which no module can take
OWN_LOSS = ""


class CannotStack(Exception):  # noqa: N818 - a finding, not a fault
    """Why a module, an optimizer or its data cannot be trained in slots."""


class TrainingStep:
    """A module's ``training_step`` as a function of its tensors, with what it logs returned."""

    def __init__(self, module: nn.Module, takes_index: bool) -> None:
        self._wrapper = _Wrapper(module)
        self._takes_index = takes_index

    def __call__(
        self, tensors: Mapping[str, Tensor], batch: Any, count: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float | None]]]:
        """Return the loss and, by name, logged values with their batch sizes if given."""
        inner = {f"module.{name}": tensor for name, tensor in tensors.items()}
        # no number: a step that decides something by its index cannot be the same for all slots
        arguments = (batch, count.long()) if self._takes_index else (batch,)
        logged: dict[str, tuple[Tensor, float | None]] = {}
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run the fused ones client by client
            output = functional_call(self._wrapper, inner, (logged, *arguments))
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise CannotStack("its training_step returned no loss")
        loss = loss.reshape(())
        return loss, {OWN_LOSS: (loss.detach(), None), **logged}


class _Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, logged: dict[str, tuple[Tensor, float | None]], *arguments: Any) -> Any:
        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if not isinstance(value, Tensor | float | int):
                raise CannotStack(f"it logs a {type(value).__name__} as {name!r}")
            if options.get("reduce_fx", "mean") != "mean":
                raise CannotStack(f"it logs {name!r} with a reduce_fx other than mean")
            tensor = torch.as_tensor(value).detach().reshape(()).float()
            logged[name] = tensor, options.get("batch_size")

        before = self.module.__dict__.get("log")
        self.module.__dict__["log"] = log
        try:
            return self.module.training_step(*arguments)  # type: ignore[operator]
        finally:
            if before is None:
                del self.module.__dict__["log"]
            else:
                self.module.__dict__["log"] = before


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a batch, in tuples, lists and dicts.

    Raises:
        CannotStack: if the batch holds anything else.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, list | tuple):
        return type(batch)([map_tensors(function, part) for part in batch])
    if isinstance(batch, dict):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    raise CannotStack(f"its batches hold a {type(batch).__name__}")
