"""One pass of Lightning's training loop in a federated run.

Lightning's loop gives each batch to one of two sub-loops: that of automatic optimization, or its twin for modules
that step their optimizers by hand. In a federated run a batch is the clients of a round, and `install` makes the
sub-loop run a round: they train and the server steps, before validation and checkpoints, and ``global_step``
advances by one.

This is the only file that touches protected names of Lightning:
`_AutomaticOptimization` with its ``run`` and ``optim_progress``, `_ManualOptimization` with its ``run``
and ``optim_step_progress``, and ``automatic_optimization`` and ``manual_optimization`` of
``trainer.fit_loop.epoch_loop``. They are unchanged in Lightning 2.5 and 2.6
and are checked when this file is imported and when the loop is installed. If the launcher ends all
processes together, ``_broadcast_sigterm_tensor`` of Lightning 2.6 does nothing: it would synchronise
the processes before every round. This file also reads and sets the counters of rounds
(``epoch_progress``, ``batch_progress``), the place where a resumed run begins (``restarted_mid_epoch``
and its like of both loops), and ``_data_fetcher``, which begins anew in every round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization

from fl_lightning.federation.round_cohorts import CohortBatch

_ADVICE = (
    f"fl_lightning works with Lightning 2.5 and 2.6; Lightning {lightning.__version__} has changed "
    "its training loop. Install lightning>=2.5.1,<2.7."
)
if list(inspect.signature(_AutomaticOptimization.run).parameters) != [
    "self",
    "optimizer",
    "batch_idx",
    "kwargs",
] or list(inspect.signature(_ManualOptimization.run).parameters) != ["self", "kwargs"]:
    raise ImportError(_ADVICE)


def install(trainer: Trainer, train: Callable[[CohortBatch], None]) -> None:
    """Make Lightning's optimization loop run a federated round in place of an optimizer step; its counters are kept.

    ``global_step`` counts rounds: the loop does not see the optimizer steps of clients.

    Args:
        trainer: a Trainer that is about to train.
        train: trains the clients of a round and steps the server.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    stock: Any = getattr(epoch_loop, "automatic_optimization", None)
    by_hand: Any = getattr(epoch_loop, "manual_optimization", None)
    if not (isinstance(stock, _AutomaticOptimization) and isinstance(by_hand, _ManualOptimization)):
        raise ImportError(_ADVICE)  # noqa: TRY004 - it is the installed version that is wrong
    steps = _steps(trainer)

    def run(*arguments: Any) -> dict[str, Any]:
        """Run one round. The last argument of Lightning's optimization loops holds the batch, the round's clients."""
        train(next(iter(arguments[-1].values())))
        steps.increment_ready()
        steps.increment_completed()
        return {}

    sub_loop: Any = stock if trainer.lightning_module.automatic_optimization else by_hand
    sub_loop.run = run
    if getattr(trainer.strategy.launcher, "ends_all", False):
        epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def training_loader(trainer: Trainer) -> Any:
    """Set up and return a central fit's training data loader, earlier than Lightning would."""
    trainer.fit_loop.setup_data()
    return trainer.train_dataloader


def progress(trainer: Trainer) -> dict[str, Any]:
    """Return the state of Lightning's epoch and step counters, which both count rounds in a federation."""
    steps = _steps(trainer).state_dict()
    return {"epochs": trainer.fit_loop.epoch_progress.state_dict(), "steps": steps}


def load_progress(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore ``current_epoch`` and ``global_step`` from the state that `progress` returned."""
    trainer.fit_loop.epoch_progress.load_state_dict(state["epochs"])
    _steps(trainer).load_state_dict(state["steps"])


def set_round(trainer: Trainer, number: int) -> None:
    """Set the number of the round (Lightning's epoch) that is about to start, before `on_train_epoch_start`.

    A site trains only in rounds in which its clients are sampled; in an asynchronous run it may train
    several times in one round.
    """
    present: Any = trainer.fit_loop.epoch_progress.current
    fetcher: Any = trainer.fit_loop._data_fetcher
    if number == 0 and present.processed > 0 and fetcher is not None:
        iter(fetcher)  # as Lightning itself does in all rounds but that of number 0
    present.ready, present.started = number + 1, number
    present.processed = present.completed = number


def is_in_round(trainer: Trainer) -> bool:
    """Return whether a round (or a central fit's epoch) is open: begun, but not yet counted as done by Lightning."""
    epochs = trainer.fit_loop.epoch_progress.current
    return trainer.state.fn == "fit" and epochs.completed < epochs.ready


def num_batches(trainer: Trainer) -> float:
    """Return Lightning's number of batches of an epoch, which is 1 in a federation."""
    return trainer.fit_loop.max_batches


def plan_rounds(trainer: Trainer, number: int | None) -> None:
    """Set the number of planned rounds, which schedules may read; None for no end."""
    trainer.fit_loop.max_epochs = -1 if number is None else number


def _steps(trainer: Trainer) -> Any:
    """Return Lightning's counter behind ``global_step``: that of automatic or of manual optimization."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step
    return loop.manual_optimization.optim_step_progress


def begin_round_anew(trainer: Trainer) -> None:
    """Make a resumed run train the first round that is not done.

    From a checkpoint at the end of a round's training, Lightning counts the round as done but would
    skip ``on_train_epoch_start`` of the next one. From a checkpoint inside that hook, it would take the
    previous round's batch for that of the new one, and train no client.

    Args:
        trainer: a Trainer whose progress has been restored.
    """
    rounds = trainer.fit_loop
    if rounds.restarted_on_epoch_start:
        rounds.epoch_loop.restarting = False
        # Lightning has set it back and will not count it anew: the next resumption would leave out a round
        rounds.epoch_progress.current.ready += 1
    elif rounds.restarted_mid_epoch and rounds.epoch_loop.restarted_on_train_batch_end:
        rounds.reset_restart_stage()
