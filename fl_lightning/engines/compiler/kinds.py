"""What tells whether two arguments are of one kind: the same graph serves both."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
