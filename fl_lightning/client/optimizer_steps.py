"""How many of a client's local steps its optimizers took, counted without waiting for the device.

A step is not taken where ``training_step`` returned None to skip the batch, where a gradient scaler
found gradients that are not finite, and where the module's own ``optimizer_step`` leaves it out.
Where ``training_step`` steps the optimizers by hand, each of their steps on a gradient counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.wrapped_optimizers import OutermostSteps


class OptimizerSteps:
    """Counts inside a ``with`` block, from 0.

    Args:
        optimizers: the client's.
        by_hand: whether each of their steps counts, and not the local step.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with OptimizerSteps([optimizer]) as steps:
        ...     for loss in (weight.square().sum(), None):
        ...         optimizer.zero_grad()
        ...         if loss is not None:
        ...             loss.backward()
        ...         optimizer.step()
        ...         steps.end_step(loss)
        >>> steps.taken
        1
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, by_hand: bool = False) -> None:
        self._optimizers, self._by_hand = list(optimizers), by_hand
        self._watched = OutermostSteps(self._optimizers, after=self._note)

    def __enter__(self) -> Self:
        self._counts = dict.fromkeys(self._optimizers, 0)
        self._has_stepped: set[Optimizer] = set()
        self._overflows: dict[Optimizer, list[Tensor]] = {each: [] for each in self._optimizers}
        self._watched.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.__exit__(None, None, None)

    def _note(self, optimizer: Optimizer) -> None:
        if self._by_hand:
            self._counts[optimizer] += _has_gradient(optimizer)
        else:
            self._has_stepped.add(optimizer)
        # a scaler always calls fused ones, which then look at this by themselves
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            self._overflows[optimizer].append(overflow)

    def end_step(self, loss: Tensor | None) -> None:
        """Count a local step, given its loss, if it was taken."""
        for optimizer in self._has_stepped:
            # private steps keep their loss for themselves, those that were skipped have no gradient
            self._counts[optimizer] += loss is not None or _has_gradient(optimizer)
        self._has_stepped.clear()

    @property
    def taken(self) -> int | tuple[int, ...]:
        """Number of steps of the optimizer, or of each of several."""
        totals = [
            count - (int(torch.stack(found).count_nonzero()) if found else 0)
            for count, found in zip(self._counts.values(), self._overflows.values(), strict=True)
        ]
        return totals[0] if len(totals) == 1 else tuple(totals)


def _has_gradient(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(param.grad is not None for group in groups for param in group["params"])
