"""How many of a client's local steps its optimizer took, counted without waiting for the device.

A step is not taken where ``training_step`` returned None to skip the batch, where a gradient scaler
found gradients that are not finite, and where the module's own ``optimizer_step`` leaves it out.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer


class OptimizerSteps:
    """Counts inside a ``with`` block, from 0.

    Args:
        optimizer: the client's.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with OptimizerSteps(optimizer) as steps:
        ...     for loss in (weight.square().sum(), None):
        ...         optimizer.zero_grad()
        ...         if loss is not None:
        ...             loss.backward()
        ...         optimizer.step()
        ...         steps.end_step(loss)
        >>> steps.total()
        1
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> Self:
        self._count, self._has_stepped = 0, False
        self._overflows: list[Tensor] = []
        self._handle = self._optimizer.register_step_post_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._has_stepped = True
        # a scaler always calls fused ones, which then look at this by themselves
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            self._overflows.append(overflow)

    def end_step(self, loss: Tensor | None) -> None:
        """Count a local step, given its loss, if it was taken."""
        # private steps keep their loss for themselves, those that were skipped have no gradient
        self._count += self._has_stepped and (loss is not None or self._has_gradient())
        self._has_stepped = False

    def _has_gradient(self) -> bool:
        groups = self._optimizer.param_groups
        return any(param.grad is not None for group in groups for param in group["params"])

    def total(self) -> int:
        """Return how many steps were taken."""
        if not self._overflows:
            return self._count
        return self._count - int(torch.stack(self._overflows).count_nonzero())
