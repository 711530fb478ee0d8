"""Which hooks a user's module overrides, and whose batches they see.

The module's own batch hooks see local batches, as they do in central training. Lightning's loop
would also hand them the client groups that it takes for batches: while a federation trains, the
hooks are shadowed by ones that let a group pass untouched. How callbacks see groups says `round_hooks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fl_lightning.federation.groups import ClientGroup

BATCH_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_batch_end",
)
# Attributes that Lightning and a federation set on a module: no client's.
NOT_THE_USERS = frozenset(
    {*vars(LightningModule()).keys() - vars(nn.Module()).keys(), "log", *BATCH_HOOKS}
)
# Overriding one of these means that a plain forward, backward, step would leave something out.
STEP_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)


def overrides(owner: Any, hook: str) -> bool:
    """Return whether a module, data module or callback defines a hook of its own."""
    for parent in (LightningModule, LightningDataModule, Callback):
        if isinstance(owner, parent):
            return hasattr(parent, hook) and is_overridden(hook, owner, parent)
    return False


class GroupsPassBy:
    """Shadows the batch hooks of an owner; `remove` uncovers them again."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._own: dict[str, Any] = {}
        self._shadowed = [hook for hook in BATCH_HOOKS if overrides(owner, hook)]
        for hook in self._shadowed:
            if hook in vars(owner):
                self._own[hook] = vars(owner)[hook]
            object.__setattr__(owner, hook, _unless_group(getattr(owner, hook)))

    def remove(self) -> None:
        """Put back what was there."""
        for hook in self._shadowed:
            object.__delattr__(self._owner, hook)
            if hook in self._own:
                object.__setattr__(self._owner, hook, self._own[hook])
        self._shadowed = []


def _unless_group(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        group = next((a for a in [*args, *kwargs.values()] if isinstance(a, ClientGroup)), None)
        return hook(*args, **kwargs) if group is None else group

    return guarded
