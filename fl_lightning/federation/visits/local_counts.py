"""Counters of steps and batches that a module reads from its Trainer, per client.

To Lightning, an epoch is a round, a batch its clients, and an optimizer step one of the server. A
module means the steps and batches of a client. In a federated fit its Trainer therefore returns:

    num_training_batches        batches of the client's round; planned ones in ``configure_optimizers``
    is_last_batch               true at the client's last batch
    estimated_stepping_batches  rounds · N, with N the planned local steps of a round
    global_step                 number of rounds; logged once if a training step reads it
    current_epoch               in a training step the round in which the client started, which in an
                                asynchronous run is not the server's

N is the largest number of local steps of a client. Training steps can call `local_step` and `client_id`.
Learning-rate schedules with ``interval: step`` count local steps in the same way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.state.round_start import LocalSchedules
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.engines import STEPS_IN_SLOTS, CannotStack


@dataclass
class LocalCounts:
    """Counters of batches and steps of the client that trains, which the Trainer shows to the module.

    Attributes:
        planned_steps: local steps of a round as schedules count them, N.
        planned_batches: planned batches of a client until the fit starts; then 0.
        work: work of the client that trains; None between clients and in slots.
        slots_round: round of the clients that train in slots; None otherwise.
        batch: index of the client's current batch, from 0.
        step: index of the client's current local step in the round, from 0.
        is_in_step: whether a local step is running.
        moved_to: local step of the run to which schedules are being advanced; 0 otherwise.
        reads_rounds: whether a local step has read ``global_step`` and this has not been logged yet.
        is_told: whether it has been logged.
    """

    planned_steps: int = 0
    planned_batches: int = 0
    work: ClientWork | None = None
    slots_round: int | None = None
    batch: int = 0
    step: int = 0
    is_in_step: bool = False
    moved_to: int = 0
    reads_rounds: bool = False
    is_told: bool = False

    @contextmanager
    def of(self, work: ClientWork) -> Iterator[None]:
        """Make the counters count one client's batches and steps inside this block; blocks may be nested."""
        before = self.work, self.batch, self.step
        self.work, self.batch, self.step = work, 0, 0
        try:
            yield
        finally:
            self.work, self.batch, self.step = before

    @contextmanager
    def of_slots(self, round_index: int) -> Iterator[None]:
        """Mark that clients train in slots inside this block."""
        self.slots_round = round_index
        try:
            yield
        finally:
            self.slots_round = None
            self.tell_of_rounds()

    def tell_of_rounds(self) -> None:
        """Log once that ``global_step`` counts rounds, if a local step has read it."""
        if self.reads_rounds:
            self.reads_rounds, self.is_told = False, True
            rank_zero_info(
                "steps: the module reads global_step while a client trains; it counts rounds. "
                "fl_lightning.federation.local_step(self) counts local steps"
            )

    def refuse_in_slots(self, name: str) -> None:
        """Raise `CannotStack`: a training step in slots reads a counter that differs between clients."""
        raise CannotStack(f"training_step reads {name}, which differs between clients")


class _CountingTrainer(Trainer):
    """Trainer in a federated fit: its counters of batches and steps are those of the client that trains."""

    local_counts: LocalCounts

    @property
    def num_training_batches(self) -> int | float:
        counts = self.local_counts
        if counts.slots_round is not None:
            counts.refuse_in_slots("trainer.num_training_batches")
        if counts.work is not None:
            return len(counts.work.sizes)
        return counts.planned_batches or super().num_training_batches

    @property
    def is_last_batch(self) -> bool:
        counts = self.local_counts
        if counts.slots_round is not None:
            counts.refuse_in_slots("trainer.is_last_batch")
        if counts.work is not None:
            return counts.batch == len(counts.work.sizes) - 1
        return super().is_last_batch

    @property
    def estimated_stepping_batches(self) -> int | float:
        limits = [n for n in (self.max_epochs, self.max_steps) if n is not None and n >= 0]
        return self.local_counts.planned_steps * min(limits) if limits else math.inf

    @property
    def global_step(self) -> int:
        counts = self.local_counts
        if counts.is_in_step or counts.slots_round is not None:
            counts.reads_rounds = not counts.is_told
        return counts.moved_to or super().global_step


class _LateClientsTrainer(_CountingTrainer):
    """Trainer in an asynchronous fit: in a training step ``current_epoch`` is the round in which the client started."""

    @property
    def current_epoch(self) -> int:
        counts, began = self.local_counts, None
        if STEPS_IN_SLOTS:  # between these steps the server reads its own round
            began = counts.slots_round
        elif counts.is_in_step and counts.work is not None:
            began = counts.work.round_index
        return super().current_epoch if began is None else began


def count_locally(
    trainer: Trainer,
    planned_steps: int,
    planned_batches: int,
    cleanup: ExitStack,
    *,
    has_late_clients: bool = False,
) -> None:
    """Make a Trainer's batch and step counters count per client, until ``cleanup`` closes.

    Args:
        trainer: a Trainer whose module is about to build its optimizers.
        planned_steps: local steps of a round as schedules count them.
        planned_batches: largest number of batches of a client.
        cleanup: restores the Trainer.
        has_late_clients: whether clients may have begun in an earlier round.
    """
    kind = type(trainer)
    trainer.local_counts = LocalCounts(planned_steps, max(1, planned_batches))  # type: ignore[attr-defined]
    own = _LateClientsTrainer if has_late_clients else _CountingTrainer
    counting = type(kind.__name__, (own, kind), {"__module__": kind.__module__})
    object.__setattr__(trainer, "__class__", counting)
    cleanup.callback(vars(trainer).pop, "local_counts")
    cleanup.callback(setattr, trainer, "__class__", kind)


def counts_of(trainer: Trainer) -> LocalCounts:
    """Return a Trainer's per-client counters of batches and steps."""
    assert isinstance(trainer, _CountingTrainer)
    return trainer.local_counts


@contextmanager
def counted(trainer: Trainer, work: ClientWork) -> Iterator[None]:
    """Count a client's batches and steps on the Trainer inside this block, in a fit or outside of it.

    Outside of a fit no rounds are planned, and `local_step` begins at 0.
    """
    with ExitStack() as cleanup:
        if not isinstance(trainer, _CountingTrainer):
            count_locally(trainer, len(work.sizes), 0, cleanup)
            work = work._replace(round_index=0)
        cleanup.enter_context(counts_of(trainer).of(work))
        yield


def note_step(trainer: Trainer, index: int) -> None:
    """Set the Trainer's batch index and local step while its module takes steps outside Lightning's loops."""
    if isinstance(trainer, _CountingTrainer):
        trainer.local_counts.batch = trainer.local_counts.step = index


def local_step(module: LightningModule) -> int | Tensor:
    """Returns the index of the local step in the run, from 0; for training steps.

    Step k of a client in round r is N r + k, with N the planned local steps of a round. In central
    training it is ``global_step``. Where many clients train at once it is a tensor with one element.
    """
    trainer = module.trainer
    if not isinstance(trainer, _CountingTrainer):
        return trainer.global_step
    counts = trainer.local_counts
    step = STEPS_IN_SLOTS[0].long() if STEPS_IN_SLOTS else counts.step
    number = counts.slots_round if counts.work is None else counts.work.round_index
    return counts.planned_steps * (number or 0) + step


def client_id(module: LightningModule) -> int | None:
    """Returns the id of the client that trains; None in central training and between clients.

    Clients of a module whose training step reads it train one after the other.
    """
    trainer = module.trainer
    if not isinstance(trainer, _CountingTrainer):
        return None
    counts = trainer.local_counts
    if counts.slots_round is not None:
        counts.refuse_in_slots("client_id")
    return None if counts.work is None else counts.work.client_id


def local_schedules(trainer: Trainer) -> LocalSchedules | None:
    """Return planned local steps, and a function that advances ``interval: step`` schedules; None without these.

    Raises:
        ConfigurationError: for a schedule that waits for a metric or has a frequency.
    """
    module, counts = trainer.lightning_module, counts_of(trainer)
    configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
    if not module.automatic_optimization or not configs:
        return None
    if any(each.reduce_on_plateau for each in configs):
        raise ConfigurationError(
            "configure_optimizers: ReduceLROnPlateau with interval 'step' waits for a metric in every "
            "local step, and metrics are known once a round: set interval to 'epoch'"
        )
    if frequencies := [each.frequency for each in configs if each.frequency != 1]:
        raise ConfigurationError(
            f"configure_optimizers: a schedule with interval 'step' and frequency {frequencies[0]} counts "
            "the batches of an epoch, a number that differs between clients: set frequency to 1, and use a "
            "schedule that changes the rate more rarely"
        )
    for config in configs:
        config.frequency = sys.maxsize

    def advance(number: int) -> None:
        counts.moved_to = number  # the step that the hook sees in central training
        try:
            for config in configs:
                module.lr_scheduler_step(config.scheduler, None)
        finally:
            counts.moved_to = 0

    return counts.planned_steps, advance
