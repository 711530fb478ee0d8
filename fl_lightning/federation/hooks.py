"""Hooks of module and callbacks in a federated fit: which are overridden, and the batches they see.

The module's own batch hooks see local batches, as they do in central training. Lightning's loop
would also hand them the client groups that it takes for batches: while a federation trains, the
hooks are shadowed by ones that let a group pass untouched.

For callbacks a round is one batch, with all its clients: it starts ahead of the first group and ends when the
server has stepped. How many groups make up a round is a matter of speed (`Federation`'s
``clients_per_group``), and an average of the weights that is kept in ``on_train_batch_end`` must not depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fl_lightning.client.log_collector import shadowed
from fl_lightning.federation.groups import ClientGroup, RoundGroups

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

# They show, measure, stop or save while a round is under way, and compute nothing of its groups.
_SEE_GROUPS = (Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor, Timer)
_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def overrides(owner: Any, hook: str) -> bool:
    """Return whether a module, data module or callback defines a hook of its own."""
    for parent in (LightningModule, LightningDataModule, Callback):
        if isinstance(owner, parent):
            return hasattr(parent, hook) and is_overridden(hook, owner, parent)
    return False


def keep_groups_from_hooks(owner: Any, cleanup: ExitStack) -> None:
    """Make an owner's batch hooks return client groups unchanged, until the cleanup."""
    for hook in BATCH_HOOKS:
        if overrides(owner, hook):
            cleanup.enter_context(shadowed(owner, hook, _unless_group(getattr(owner, hook))))


def _unless_group(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        group = next((a for a in [*args, *kwargs.values()] if isinstance(a, ClientGroup)), None)
        return hook(*args, **kwargs) if group is None else group

    return guarded


def sees_groups(callback: Callback) -> bool:
    """Return whether a callback's batch hooks are called for every group.

    They are for callbacks that show progress, measure or save inside a round, for those of
    fl_lightning, and for those with an attribute ``sees_groups = True``.

    Example:
        >>> sees_groups(Timer()), sees_groups(Callback())
        (True, False)
    """
    is_ours = type(callback).__module__.startswith("fl_lightning.")
    return is_ours or isinstance(callback, _SEE_GROUPS) or getattr(callback, "sees_groups", False)


def call_batch_hooks_per_round(trainer: Trainer, groups: RoundGroups, cleanup: ExitStack) -> None:
    """Call callbacks' batch hooks once a round, see `sees_groups`, until the cleanup."""
    told = []  # callbacks of Lightning expect nothing else
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if sees_groups(callback) or not any(overrides(callback, hook) for hook in _HOOKS):
            continue
        for hook, once in zip(_HOOKS, _once_per_round(callback, groups), strict=True):
            cleanup.enter_context(shadowed(callback, hook, once))
        if not type(callback).__module__.startswith("lightning."):
            told.append(type(callback).__name__)
    if told:
        rank_zero_info(
            f"callbacks: on_train_batch_start and on_train_batch_end of {', '.join(told)} are called "
            "once a round (for every group of clients with an attribute sees_groups = True)"
        )


def _once_per_round(
    callback: Callback, groups: RoundGroups
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks of a callback that sees a round as one batch."""
    own_start, own_end = (getattr(callback, hook) for hook in _HOOKS)
    begun = -1

    def start(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        nonlocal begun  # also the first group after resuming begins a round
        if begun != trainer.current_epoch:
            begun = trainer.current_epoch
            own_start(trainer, pl_module, groups.whole, 0)

    def end(
        trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_last_batch:  # the server has stepped
            own_end(trainer, pl_module, outputs, groups.whole, 0)

    return start, end
