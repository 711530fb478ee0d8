"""Hooks of module and callbacks in a federated fit: which are overridden, and the batches they see.

The module's own batch hooks see local batches, as they do in central training. Lightning's loop
would also hand them the clients of a round, its own batch: while a federation trains, the
hooks are shadowed by ones that let those pass untouched.

For callbacks a round is one batch, its clients; it ends when the server has stepped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fl_lightning.client.log_collector import shadowed
from fl_lightning.federation.round_cohorts import CohortBatch

BATCH_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_batch_end",
)
# Attributes that Lightning and a federation set on a module: no part of a client's state.
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
    """Return whether a module, data module or callback overrides a given Lightning hook."""
    for parent in (LightningModule, LightningDataModule, Callback):
        if isinstance(owner, parent):
            return hasattr(parent, hook) and is_overridden(hook, owner, parent)
    return False


def keep_cohorts_from_hooks(owner: Any, cleanup: ExitStack) -> None:
    """Make batch hooks of a module or data module return a round's client ids unchanged, until ``cleanup`` closes."""
    for hook in BATCH_HOOKS:
        if overrides(owner, hook):
            cleanup.enter_context(shadowed(owner, hook, _unless_cohort(getattr(owner, hook))))


def _unless_cohort(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        cohort = next((a for a in [*args, *kwargs.values()] if isinstance(a, CohortBatch)), None)
        return hook(*args, **kwargs) if cohort is None else cohort

    return guarded
