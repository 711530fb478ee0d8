"""Places that hold numbers: tensors, arrays, generators of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.state.same_values import same_array, same_tensor, same_value


class TensorValue:
    """A tensor's numbers, ``requires_grad`` and gradient."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self._tensor = path, tensor
        self._before = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._grad = tensor.grad if tensor.is_leaf else None

    def _has_its_gradient(self) -> bool:
        return not self._tensor.is_leaf or self._tensor.grad is self._grad

    def is_same(self) -> bool:
        """Return whether the numbers are the same; also what ``.data`` was used for is seen."""
        return same_tensor(self._tensor, self._before) and self._has_its_gradient()

    def differences(self) -> list[str]:
        """Return the tensor, or its gradient, if it differs."""
        if not same_tensor(self._tensor, self._before):
            return [self.path]
        return [] if self._has_its_gradient() else [f"{self.path}.grad"]

    def put_back(self) -> None:
        """Copy the numbers back, in place where the shape allows."""
        tensor, before = self._tensor, self._before
        if not self._has_its_gradient():
            tensor.grad = self._grad
        is_on_a_device = tensor.device.type != "cpu"  # where comparing waits for it to be done
        if not is_on_a_device and same_tensor(tensor, before):
            return
        with torch.no_grad():
            if tensor.shape == before.shape and tensor.dtype == before.dtype:
                tensor.copy_(before)
            else:
                tensor.data = before.detach().clone()
        if tensor.is_leaf and tensor.requires_grad != before.requires_grad:
            tensor.requires_grad_(before.requires_grad)


class ArrayValue:
    """A NumPy array's numbers."""

    def __init__(self, path: str, array: np.ndarray[Any, Any]) -> None:
        self.path, self._array, self._before = path, array, array.copy()

    def is_same(self) -> bool:
        """Return whether the numbers are the same."""
        return same_array(self._array, self._before)

    def differences(self) -> list[str]:
        """Return the array, if it differs."""
        return [] if self.is_same() else [self.path]

    def put_back(self) -> None:
        """Copy the numbers back."""
        if self.is_same():
            return
        if self._array.shape != self._before.shape:
            self._array.resize(self._before.shape, refcheck=False)
        self._array[...] = self._before


class GeneratorState:
    """The state of a generator of random numbers.

    Args:
        path: where it is.
        read: returns a copy of its state.
        write: sets it.
    """

    def __init__(self, path: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.path, self._read, self._write, self._before = path, read, write, read()

    def is_same(self) -> bool:
        """Return whether it would go on as it would have."""
        now, before = self._read(), self._before
        # Python's is a tuple of 625 numbers, to look at which one by one takes a hundred times longer
        return bool(now == before) if isinstance(now, tuple) else same_value(now, before)

    def differences(self) -> list[str]:
        """Return the generator, if numbers were drawn."""
        return [] if self.is_same() else [self.path]

    def put_back(self) -> None:
        """Have it go on from where it was."""
        if not self.is_same():
            self._write(self._before)
