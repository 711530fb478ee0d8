"""Whether slots pay, and how many: found by measuring them against clients one after the other."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import CannotStack, receive_usable
from fl_lightning.federation.execution.engine_options import SHORT_RUN_STEPS, most_parameters
from fl_lightning.federation.execution.slot_engine import (
    SlotEngine,
    Stacking,
    TrainOne,
    agreeing,
    copies_per_slot,
    fitting_slots,
)
from fl_lightning.federation.execution.slot_tuning import Remembered, fastest
from fl_lightning.federation.execution.trial_budget import TrialBudget
from fl_lightning.server.means.running_mean import RunningMean

# Compiling takes 5 to 20 seconds: less local training than this does not repay it.
SHORT_RUN_SECONDS = 60.0
# Trying out several numbers of slots means as many compilations.
LONG_RUN_SECONDS = 600.0
# What one run of a trial would take one client after the other.
_TRIAL_SECONDS = 1.0
_LEAST_RATIO = 1.1


@dataclass
class SlotTrial:
    """Tries slots on some clients' work.

    Args:
        trainer: set up for fitting.
        local: the sequential engine.
        stacking: how clients would be stacked; the number of slots and the rest are found.
        num_slots: how many are wanted; chosen if None.

    Attributes:
        times_faster: than one after the other clients train in slots; None if not measured.
    """

    trainer: Trainer
    local: LocalTrainer
    stacking: Stacking
    num_slots: int | None = None
    times_faster: float | None = None
    _engines: dict[int, SlotEngine] = field(default_factory=dict)
    _budget: TrialBudget = field(default_factory=lambda: TrialBudget(math.inf))

    def force(
        self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
    ) -> SlotEngine:
        """Return slots without measuring.

        Args:
            model: the global model.
            work: of some clients.
            train_one: trains a client sequentially.

        Raises:
            CannotStack: if their updates are not those of the sequential engine.
        """
        stacking = replace(
            agreeing(self.trainer, self.local, self.stacking, model, work, train_one),
            num_slots=self.num_slots or self._fitting_slots(work),
            compiled=self.num_steps(work) >= SHORT_RUN_STEPS,
        )
        return SlotEngine(self.trainer, self.local, stacking)

    def measure(
        self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
    ) -> tuple[SlotEngine, str]:
        """Return slots and why, if they are faster; arguments as for `force`.

        Raises:
            CannotStack: if they are not, or the run is too short for them to repay a compiler.
        """
        seconds_per_step = self._sequential_seconds(work, train_one)
        total = seconds_per_step * self.num_steps(work)
        if total < SHORT_RUN_SECONDS:
            raise CannotStack(f"{total:.0f} s of training do not repay a compiler")
        self._budget = TrialBudget(total)
        self._budget.announce("whether many clients at once are faster")
        self.stacking = agreeing(self.trainer, self.local, self.stacking, model, work, train_one)
        work, share = self._stackable(work)
        trial = _shortened(work, max_steps=math.ceil(_TRIAL_SECONDS / seconds_per_step))
        began = time.perf_counter()
        number = self._number(model, work, trial, is_long=total > LONG_RUN_SECONDS)
        engine = self._engine(number, model, trial)
        self._engines = {}  # frees the others
        self.times_faster = _times_faster(engine, model, trial, train_one)
        ratio = 1 / (share / self.times_faster + 1 - share)
        spent = time.perf_counter() - began
        if ratio < _LEAST_RATIO:
            raise CannotStack(f"{number} slots were measured at {ratio:.2f} times its speed")
        how = "compiled in" if engine.is_compiled else "not compiled, tried for"
        return engine, f"measured at {ratio:.1f} times the sequential speed, {how} {spent:.0f} s"

    def _stackable(self, work: Sequence[ClientWork]) -> tuple[Sequence[ClientWork], float]:
        """Return whom slots can train, and their share of all steps."""
        engine = SlotEngine(self.trainer, self.local, self.stacking)
        fitting = list(engine.split(GroupWork.of(work))[0])
        if not fitting:
            raise CannotStack("no client has a full batch")
        steps = [sum(len(client.sizes) for client in some) for some in (fitting, work)]
        return fitting, steps[0] / steps[1]

    def num_steps(self, work: Sequence[ClientWork]) -> float:
        """Return about how many local steps the whole run has; it is not shorter when resumed."""
        # a round is one step of the server
        limits = (self.trainer.max_epochs, self.trainer.max_steps)
        rounds = min((n for n in limits if n is not None and n >= 0), default=math.inf)
        if math.isinf(rounds):
            return rounds
        return rounds * self.trainer.num_training_batches * sum(len(w.sizes) for w in work)

    def _sequential_seconds(self, work: Sequence[ClientWork], train_one: TrainOne) -> float:
        """Return those of a step, where it is not clear beforehand that slots do not pay."""
        num_steps, size = self.num_steps(work), self.local.space.num_entries
        if num_steps < SHORT_RUN_STEPS:
            raise CannotStack(f"{num_steps:.0f} local steps do not repay a compiler")
        if size > most_parameters(self.trainer.strategy.root_device):
            raise CannotStack(f"the steps of a model of {size:,} parameters are large enough")
        sample = max(work, key=lambda client: len(client.sizes)).head(10)
        return _seconds(lambda: train_one(sample)) / len(sample.sizes)

    def _engine(self, number: int, model: GlobalModel, trial: Sequence[ClientWork]) -> SlotEngine:
        """Return compiled slots."""
        if number not in self._engines:
            stacking = replace(self.stacking, num_slots=number, compiled=True)
            began = time.monotonic()
            self._engines[number] = SlotEngine(self.trainer, self.local, stacking)
            _train_all(self._engines[number], model, trial)  # compiles
            self._budget.note(time.monotonic() - began)
        return self._engines[number]

    def _number(
        self,
        model: GlobalModel,
        work: Sequence[ClientWork],
        trial: Sequence[ClientWork],
        *,
        is_long: bool,
    ) -> int:
        """Return how many slots to take: as told, as remembered, tried out, or by size."""
        if self.num_slots is not None:
            return self.num_slots
        start = self._fitting_slots(work)
        if not is_long:
            return _without_idle_slots(start, work)

        def ratio(number: int, other: int) -> float:
            if not self._budget.has_room():
                return math.inf  # as good as slower: nobody knows
            engines = [
                self._engine(_without_idle_slots(most, work), model, trial)
                for most in (number, other)
            ]
            if engines[0] is engines[1]:
                return 1.0
            run, run_other = (partial(_train_all, engine, model, trial) for engine in engines)
            return _ratio(run, run_other)

        remembered, key = Remembered(), self._key(len(work))
        found = remembered.get(key)
        if found is None:
            found = fastest(ratio, start, len(work))
            if not self._budget.is_cut:
                remembered.put(key, found)
        return _without_idle_slots(min(found, len(work)), work)

    def _key(self, num_clients: int) -> str:
        """Name what the best number of slots depends on."""
        trainer = self.trainer
        parts = (
            self.local.space.fingerprint(),
            trainer.datamodule.full_batch,  # type: ignore[attr-defined]
            type(trainer.optimizers[0]).__name__,
            copies_per_slot(trainer.optimizers[0]),
            trainer.precision,
            str(trainer.strategy.root_device),
            platform.processor() or platform.machine(),
            torch.get_num_threads(),
            torch.__version__,
            version("fl_lightning"),
            self.stacking.direct,
            num_clients.bit_length(),  # cohorts of about one size
        )
        return " ".join(map(str, parts))

    def _fitting_slots(self, work: Sequence[ClientWork]) -> int:
        return min(fitting_slots(self.trainer, self.local.space.num_entries), len(work))


def _without_idle_slots(most: int, work: Sequence[ClientWork]) -> int:
    """Return how many slots do with as few idle ones what ``most`` do in the same time.

    Clients of one length end together, and the last ones leave slots empty.

    Example:
        >>> work = [ClientWork(i, 4, torch.arange(4), [4]) for i in range(100)]
        >>> _without_idle_slots(32, work)  # four times 25
        25
    """
    if len({len(client.sizes) for client in work}) > 1:
        return most
    times = -(-len(work) // most)
    return -(-len(work) // times)


def _shortened(work: Sequence[ClientWork], max_steps: int) -> list[ClientWork]:
    """Return clients' first steps, in proportion to all that they have."""
    share = min(1.0, max_steps / sum(len(client.sizes) for client in work))
    return [c.head(max(1, round(share * len(c.sizes)))) for c in work[:max_steps]]


def _train_all(engine: SlotEngine, model: GlobalModel, work: Sequence[ClientWork]) -> None:
    """Train clients as a round does: their updates are looked at and folded in, none is kept."""
    mean = RunningMean(model.params)
    for group in engine.train(model, work):
        receive_usable(group, lambda usable, _: mean.add_rows(usable.deltas, usable.num_examples))


def _times_faster(
    engine: SlotEngine, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
) -> float:
    """Return how many times faster clients train together than one after the other."""
    alone = work[:: -(-len(work) // 20)]
    share = sum(len(w.sizes) for w in alone) / sum(len(w.sizes) for w in work)
    mean = RunningMean(model.params)

    def train_alone() -> None:
        for client in alone:
            mean.add(train_one(client).delta, client.num_examples)

    ratio = _ratio(train_alone, lambda: _train_all(engine, model, work), _LEAST_RATIO * share)
    return ratio / share


def _ratio(run: Callable[[], Any], other: Callable[[], Any], limit: float = 1.0) -> float:
    """Return how many times the other's time one takes.

    Both take turns, so that what else slows the machine down for a while slows both: a few turns where
    all are on one side of the limit, more where it is close.
    """
    ratios: list[float] = []
    while len(ratios) < 5 or (len(ratios) < 15 and min(ratios) < limit < max(ratios)):
        began = time.perf_counter()
        run()
        between = time.perf_counter()
        other()
        ratios.append((between - began) / (time.perf_counter() - between))
    return median(ratios)


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
