"""Whether two values are the same one to a reader: by identity, else by what they hold."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What no longer, or not yet, is there.
MISSING = object()
# Deeper than this, values that are not the same object count as different ones.
_DEEPEST = 20
_LONGEST = 24


def same_value(now: Any, before: Any, depth: int = 0) -> bool:
    """Return whether one value may stand for the other.

    Example:
        >>> same_value([1, float("nan"), torch.ones(2)], [1, float("nan"), torch.ones(2)])
        True
        >>> same_value(1, True), same_value(torch.ones(2), torch.ones(2, dtype=torch.float64))
        (False, False)
    """
    if now is before:
        return True
    if type(now) is not type(before) or depth > _DEEPEST:
        return False
    if isinstance(now, Tensor):
        return same_tensor(now, before)
    if isinstance(now, np.ndarray):
        return same_array(now, before)
    if isinstance(now, (list, tuple, deque)):
        pairs = zip(now, before, strict=False)
        return len(now) == len(before) and all(same_value(a, b, depth + 1) for a, b in pairs)
    if isinstance(now, dict):
        return [*now] == [*before] and all(same_value(now[k], before[k], depth + 1) for k in now)
    return _equal(now, before)


def _equal(now: Any, before: Any) -> bool:
    if isinstance(now, (float, np.floating)) and math.isnan(now):
        return math.isnan(before)
    try:
        equal = now == before
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises if it cannot compare
        return False
    return equal is True or (isinstance(equal, np.bool_) and bool(equal))


def same_tensor(now: Tensor, before: Tensor) -> bool:
    """Return whether tensors have the same type, shape, device, ``requires_grad`` and numbers."""
    alike = (
        now.dtype == before.dtype
        and now.shape == before.shape
        and now.device == before.device
        and now.layout == before.layout
        and now.requires_grad == before.requires_grad
    )
    return alike and same_numbers(now, before)


def same_numbers(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors of one shape and type hold the same numbers, NaN for NaN."""
    if now.device.type == "meta":
        return True
    try:
        with torch.no_grad():
            if now.layout != torch.strided:
                now, before = now.to_dense(), before.to_dense()
            if torch.equal(now, before):
                return True
            if not (now.is_floating_point() or now.is_complex()):
                return False
            return bool(((now == before) | (now.isnan() & before.isnan())).all())
    except RuntimeError:  # one that has outlived the transform that made it, e.g. vmap
        return False


def same_array(now: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> bool:
    """Return whether arrays have the same type, shape and numbers."""
    if now.dtype != before.dtype or now.shape != before.shape:
        return False
    if now.dtype == object:
        return same_value(now.tolist(), before.tolist())
    return np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")


def described(path: str, before: Any, now: Any) -> str:
    """Say what a change was, briefly.

    Example:
        >>> described("self.n", 0, 1), described("self.bank", [], [1, 2])
        ('self.n (0 -> 1)', 'self.bank (0 -> 2 items)')
    """
    if now is MISSING:
        return f"{path} (removed)"
    if before is MISSING:
        return f"{path} (new)"
    if _is_short(before) and _is_short(now):
        return f"{path} ({before!r} -> {now!r})"
    sized = (list, tuple, dict, set, deque)
    if isinstance(before, sized) and isinstance(now, sized) and len(before) != len(now):
        return f"{path} ({len(before)} -> {len(now)} items)"
    return path


def _is_short(value: Any) -> bool:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain and len(repr(value)) <= _LONGEST
