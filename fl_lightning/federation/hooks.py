"""Which hooks module and callbacks override, and whose batches they see.

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

from fl_lightning.federation.groups import ClientGroup, RoundGroups

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

# They show, measure, stop or save while a round is under way, and compute nothing of its groups.
_SEE_GROUPS = (Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor, Timer)
_HOOKS = ("on_train_batch_start", "on_train_batch_end")


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


def sees_groups(callback: Callback) -> bool:
    """Return whether a callback's batch hooks are called for every group.

    So it is for what shows progress, measures, or saves inside a round, for our own, and for those
    that ask for it by an attribute ``sees_groups``.

    Example:
        >>> sees_groups(Timer()), sees_groups(Callback())
        (True, False)
    """
    is_ours = type(callback).__module__.startswith("fl_lightning.")
    return is_ours or isinstance(callback, _SEE_GROUPS) or getattr(callback, "sees_groups", False)


def have_rounds_for_batches(trainer: Trainer, groups: RoundGroups) -> Callable[[], None]:
    """Call callbacks' batch hooks once a round, see `sees_groups`; returns a function that undoes it."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    shadows = [OncePerRound(callback, groups) for callback in callbacks]
    told = [shadow.name for shadow in shadows if shadow.is_told]
    if told:
        rank_zero_info(
            f"callbacks: on_train_batch_start and on_train_batch_end of {', '.join(told)} are called "
            "once a round (for every group of clients with an attribute sees_groups = True)"
        )

    def undo() -> None:
        for shadow in shadows:
            shadow.remove()

    return undo


class OncePerRound:
    """Shadows the batch hooks of a callback, so that it sees a round as one batch; `remove` undoes it.

    Args:
        callback: whose hooks.
        groups: know the clients of the round.

    Attributes:
        name: of the callback's class.
    """

    def __init__(self, callback: Callback, groups: RoundGroups) -> None:
        self._callback, self._groups = callback, groups
        self._own = {name: vars(callback)[name] for name in _HOOKS if name in vars(callback)}
        self._start, self._end = (getattr(callback, name) for name in _HOOKS)
        self._round = -1
        self.name = type(callback).__name__
        self._is_shadowed = not sees_groups(callback) and any(
            overrides(callback, h) for h in _HOOKS
        )
        if self._is_shadowed:
            vars(callback).update(zip(_HOOKS, (self.start, self.end), strict=True))

    @property
    def is_told(self) -> bool:
        """True for callbacks that are not Lightning's own: their user may have expected otherwise."""
        return self._is_shadowed and not type(self._callback).__module__.startswith("lightning.")

    def start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Call the callback's own hook ahead of the round's first group, or of the first after resuming."""
        if self._round != trainer.current_epoch:
            self._round = trainer.current_epoch
            self._start(trainer, pl_module, self._groups.whole, 0)

    def end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Call the callback's own hook after the round's last group, when the server has stepped."""
        if trainer.is_last_batch:
            self._end(trainer, pl_module, outputs, self._groups.whole, 0)

    def remove(self) -> None:
        """Put back what was there."""
        if self._is_shadowed:
            for name in _HOOKS:
                del vars(self._callback)[name]
            vars(self._callback).update(self._own)
        self._is_shadowed = False
