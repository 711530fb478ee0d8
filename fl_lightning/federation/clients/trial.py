"""The trial before a run: are many clients at once faster on some clients' work?

First slots whose step is not compiled, which cost a few steps: for small models they are 2 to 5 times as
fast as one client after the other. Then compiled ones, if what is left to train would take longer than
a compiler. Times are those that this thread computes for, whoever else has the processor meanwhile.

Which speedups of a local step to use: those asked for, or those that a trial found to pay.

A trial adds one speedup after the other, and keeps it if a client's update is still the same and
its steps take less time, both ways measured in turn. A compiled graph is tried in the other memory
layout as well.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.engines import (
    SPEEDUPS,
    CannotStack,
    NotCompiled,
    Speedup,
    reason_against,
    usable_rows,
)
from fl_lightning.federation.clients.engine_options import (
    SHORT_RUN_STEPS,
    most_parameters,
    tolerance,
)
from fl_lightning.federation.clients.in_slots import (
    SlotEngine,
    Stacking,
    TrainOne,
    agreeing,
    fitting_slots,
)
from fl_lightning.federation.visits.lightning_step import LightningStep, extra_work
from fl_lightning.server.means.running_mean import RunningMean

# A trial of slots that are not compiled takes about a tenth of this; to time one client takes some steps.
LEAST_SECONDS, LEAST_STEPS = 1.0, 500
# Compiling takes 5 to 20 s and makes steps 2 to 6 times as fast: less training does not repay it.
COMPILER_SECONDS = 20.0
# Of what is to be trained, the share that one measurement may take, and its most seconds.
_SHARE, _MOST_SECONDS = 0.02, 1.0
_LEAST_RATIO = 1.1
_TURNS = 3


@dataclass
class SlotTrial:
    """Tries slots on some clients' work.

    Args:
        trainer: set up for fitting.
        local: the sequential engine.
        stacking: how clients would be stacked; the number of slots and the rest are found.
        num_slots: how many are wanted; chosen by the model's size if None.

    Attributes:
        times_faster: than one after the other clients train in slots; None if not measured.
    """

    trainer: Trainer
    local: LocalTrainer
    stacking: Stacking
    num_slots: int | None = None
    times_faster: float | None = None

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
            CannotStack: if they are not, or the run is too short to try.
        """
        size = self.local.space.num_entries
        if size > most_parameters(self.trainer.strategy.root_device):
            raise CannotStack(f"the steps of a model of {size:,} parameters are large enough")
        if (num_steps := self.num_steps(work)) < LEAST_STEPS:
            raise CannotStack(f"{num_steps:.0f} local steps do not repay a trial")
        one = self._seconds_alone(model, work, train_one)
        if one * num_steps < LEAST_SECONDS:
            raise CannotStack(f"{one * num_steps:.1f} s of training do not repay a trial")
        began = time.perf_counter()
        self.stacking = agreeing(self.trainer, self.local, self.stacking, model, work, train_one)
        fitting, share = self._stackable(work)
        number = self.num_slots or without_idle_slots(self._fitting_slots(fitting), fitting)
        seconds = min(_MOST_SECONDS, _SHARE * one * num_steps)
        sample = sample_of(fitting, number, math.ceil(seconds / one))
        engine, in_slots = self._tried(replace(self.stacking, num_slots=number), model, sample)
        left = num_steps * (min(one, in_slots) * share + one * (1 - share))
        if is_long := left >= COMPILER_SECONDS:
            rank_zero_info("engine: compiling a step of many clients at once, for 5 to 20 s")
            stacking = replace(engine.stacking, compiled=True)
            compiled, seconds = self._tried(stacking, model, sample)
            if seconds < in_slots:
                engine, in_slots = compiled, seconds
        self.times_faster = one / in_slots
        ratio = 1 / (share / self.times_faster + 1 - share)
        spent = time.perf_counter() - began
        if ratio < _LEAST_RATIO:
            raise CannotStack(f"{number} slots were measured at {ratio:.2f} times its speed")
        why = f"measured at {ratio:.1f} times the sequential speed"
        if engine.stacking.compiled and engine.is_compiled:
            return engine, f"{why}, compiled in {spent:.0f} s"
        how = f"tried for {spent:.0f} s" if is_long else f"for {left:.0f} s of training"
        return engine, f"{why}, not compiled, {how}"

    def num_steps(self, work: Sequence[ClientWork]) -> float:
        """Return about how many local steps the whole run has; it is not shorter when resumed."""
        # a round is one step of the server
        limits = (self.trainer.max_epochs, self.trainer.max_steps)
        rounds = min((n for n in limits if n is not None and n >= 0), default=math.inf)
        if math.isinf(rounds):
            return rounds
        return rounds * self.trainer.num_training_batches * sum(len(w.sizes) for w in work)

    def _stackable(self, work: Sequence[ClientWork]) -> tuple[Sequence[ClientWork], float]:
        """Return whom slots can train, and their share of all steps."""
        engine = SlotEngine(self.trainer, self.local, replace(self.stacking, num_slots=1))
        fitting = list(engine.split(GroupWork.of(work))[0])
        steps = [sum(len(client.sizes) for client in some) for some in (fitting, work)]
        return fitting, steps[0] / steps[1]

    def _seconds_alone(
        self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
    ) -> float:
        """Return those of a step of clients that train one after the other."""
        sample = [client.head(10) for client in work[:: -(-len(work) // 4)]]
        mean = RunningMean(model.params)

        def train() -> None:
            for client in sample:
                mean.add(train_one(client).delta, client.num_examples)

        return self._seconds_per_step(train, sample)

    def _tried(
        self, stacking: Stacking, model: GlobalModel, sample: Sequence[ClientWork]
    ) -> tuple[SlotEngine, float]:
        """Return slots, compiled if they are to be, and the seconds of a client's step in them."""
        engine = SlotEngine(self.trainer, self.local, stacking)

        def train() -> None:  # as a round does: updates are looked at and folded in
            mean = RunningMean(model.params)
            for group in engine.train(model, sample):
                usable, _ = usable_rows(group)
                mean.add_rows(usable.deltas, usable.num_examples)

        train()  # compiles
        return engine, self._seconds_per_step(train, sample)

    def _seconds_per_step(self, train: Callable[[], None], sample: Sequence[ClientWork]) -> float:
        """Return the shortest time of a client's step; what else the processor does is left out."""
        is_cpu = self.trainer.strategy.root_device.type == "cpu"
        clock = time.thread_time if is_cpu else time.perf_counter
        times = []
        for _ in range(_TURNS):
            began = clock()
            train()
            times.append(clock() - began)
        return max(min(times), 1e-9) / sum(len(client.sizes) for client in sample)

    def _fitting_slots(self, work: Sequence[ClientWork]) -> int:
        return min(fitting_slots(self.trainer, self.local.space.num_entries), len(work))


def without_idle_slots(most: int, work: Sequence[ClientWork]) -> int:
    """Return how many slots do with as few idle ones what ``most`` do in the same time.

    Clients of one length end together, and the last ones leave slots empty.

    Example:
        >>> import torch
        >>> work = [ClientWork(i, 4, torch.arange(4), [4]) for i in range(100)]
        >>> without_idle_slots(32, work)  # four times 25
        25
    """
    if len({len(client.sizes) for client in work}) > 1:
        return most
    times = -(-len(work) // most)
    return -(-len(work) // times)


def sample_of(work: Sequence[ClientWork], num_slots: int, num_steps: int) -> list[ClientWork]:
    """Return the first steps of some clients, at least one client a slot, about ``num_steps`` in all.

    Example:
        >>> import torch
        >>> work = [ClientWork(i, 8, torch.arange(8), [2] * 4) for i in range(100)]
        >>> [(len(some), len(some[0].sizes)) for some in (sample_of(work, 25, n) for n in (9, 75, 240))]
        [(25, 2), (25, 3), (60, 4)]
    """
    most, chosen = max(2, num_steps // num_slots), list[ClientWork]()
    for client in work:
        if len(chosen) >= num_slots and sum(len(c.sizes) for c in chosen) >= num_steps:
            break
        chosen.append(client.head(most))
    return chosen


# What trains for less time or fewer steps does not repay a trial.
_SHORT_RUN_SECONDS = 60.0
_SHORT_RUN_STEPS = 1000
# Of what is to be trained, the share that a trial may take, and its most seconds.
_SHARE_OF_TRIAL, _MOST_SECONDS_OF_TRIAL = 0.05, 120.0
# Compiling takes 2 to 17 seconds, and brings some per cent.
_COMPILER_SECONDS = 1200.0
# What a speedup must bring, so that it is not noise.
_LEAST_SPEEDUP = 1.03
_SECONDS_OF_A_TRY = 0.1
_FEWEST_TRIES = 3
_NUM_TRIES = 5
_NUM_TRIES_OF_LONG_RUN = 15


class SpeedupTrial:
    """Finds speedups for one fit.

    Args:
        trainer: set up for fitting.
        step: the local step that may use them.
        adds_to_loss: whether a correction changes the loss of a step.
    """

    def __init__(
        self, trainer: Trainer, step: LightningStep, *, adds_to_loss: bool = False
    ) -> None:
        self._trainer, self._step, self._adds_to_loss = trainer, step, adds_to_loss
        self._num_tries = _NUM_TRIES
        self._ends = math.inf

    def force(self, speedups: Sequence[Speedup]) -> None:
        """Use what was asked for.

        Raises:
            ConfigurationError: if one of them does not apply, saying why.
        """
        for speedup in speedups:
            if reason := self._reason_against(speedup):
                raise ConfigurationError(
                    f"federation: speedups has {speedup}, but {reason}: leave it out"
                )
        self._step.use(speedups)

    def choose(self, work: Sequence[ClientWork], train_one: TrainOne, num_steps: float) -> str:
        """Use the speedups that pay.

        Args:
            work: of some clients.
            train_one: trains a client sequentially, without consequences.
            num_steps: local steps of the whole run, about.

        Returns:
            What was chosen, in words; nothing if there is nothing to say.

        Raises:
            ClientFailure: if a client fails without any speedup.
        """
        if num_steps < _SHORT_RUN_STEPS:
            return ""
        candidates = [s for s in SPEEDUPS if self._reason_against(s) is None and self._may_pay(s)]
        if not candidates:
            return ""
        client = max(work, key=lambda client: len(client.sizes))
        self._seconds(train_one, client.head(1))  # warms up
        one = self._seconds(train_one, client.head(1))
        if one * num_steps < _SHORT_RUN_SECONDS:
            return ""
        self._num_tries = _NUM_TRIES_OF_LONG_RUN
        if one * num_steps < _COMPILER_SECONDS:
            self._num_tries = _NUM_TRIES
            candidates = [speedup for speedup in candidates if speedup != "compiled"]
        sample = client.head(max(1, math.ceil(_SECONDS_OF_A_TRY / one)))
        limit = min(_MOST_SECONDS_OF_TRIAL, _SHARE_OF_TRIAL * one * num_steps)
        self._ends = time.perf_counter() + limit
        rank_zero_info(f"engine: measuring which speedups of a step pay, for {limit:.0f} s at most")
        expected, total, remarks = train_one(sample.head(2)), 1.0, ""
        for added in additions(candidates):
            before = self._step.speedups
            if set(added) & set(before) or time.perf_counter() > self._ends:
                continue
            ratio, remark = self._tried(before, added, sample, train_one, expected)
            pays = ratio >= _LEAST_SPEEDUP
            self._step.use((*before, *added) if pays else before)
            total *= ratio if pays else 1.0
            remarks += remark
        if not self._step.speedups:
            return remarks
        speed = f"{total:.2f} times the plain steps' speed"
        return f" with {', '.join(self._step.speedups)} ({speed}{remarks})"

    def _reason_against(self, speedup: Speedup) -> str | None:
        if not self._trainer.lightning_module.automatic_optimization:
            return extra_work(self._trainer)
        if not self._step.is_lean:
            return "accumulation, clipping, gradient scaling or hooks take part in its steps"
        if speedup == "compiled" and self._step.has_batch_hooks:
            return "the module has hooks at the start or end of a batch"
        if speedup == "compiled" and self._adds_to_loss:
            return "a correction changes the loss"
        trainer = self._trainer
        return reason_against(speedup, trainer.lightning_module, trainer.optimizers[0])

    def _may_pay(self, speedup: Speedup) -> bool:
        return speedup != "math_attention" or str(self._trainer.precision).startswith("bf16")

    def _tried(
        self,
        before: tuple[Speedup, ...],
        added: tuple[Speedup, ...],
        sample: ClientWork,
        train_one: TrainOne,
        expected: ClientUpdate,
    ) -> tuple[float, str]:
        """Return how many times faster a step is with more, 0 if impossible, and a remark."""
        is_compiled, began = "compiled" in added, time.perf_counter()
        try:
            ratio = self._ratio(before, added, sample, train_one, expected)
        except ClientFailure as failure:  # e.g. a view of images that wants the usual layout
            return 0.0, f"; {failure.__cause__ or failure.reason}" if is_compiled else ""
        spent = time.perf_counter() - began
        with_layout = " in channels_last" if len(added) > 1 else ""
        remark = f"; {ratio:.2f} by compiling{with_layout}, tried in {spent:.0f} s"
        return ratio, remark if is_compiled else ""

    def _ratio(
        self,
        before: tuple[Speedup, ...],
        added: tuple[Speedup, ...],
        sample: ClientWork,
        train_one: TrainOne,
        expected: ClientUpdate,
    ) -> float:
        """Return how many times faster a step is with more speedups; 0 if the update differs.

        Raises:
            ClientFailure: if its steps fail.
        """
        without: list[float] = []
        with_it: list[float] = []
        turns = ((before, without), ((*before, *added), with_it))
        self._step.use((*before, *added))
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotCompiled)
            found = train_one(sample.head(2))
        if not self._agree(expected, found):
            return 0.0
        for number in range(self._num_tries):
            if number >= _FEWEST_TRIES and time.perf_counter() > self._ends:
                break
            for chosen, seconds in turns:
                self._step.use(chosen)
                seconds.append(self._seconds(train_one, sample))
        # on a busy machine one of the two may be luck
        ratios = [one / other for one, other in zip(without, with_it, strict=True)]
        return min(median(ratios), min(without) / min(with_it))

    def _seconds(self, train_one: TrainOne, work: ClientWork) -> float:
        """Return what a client takes: on a CPU time of this thread, whoever else has the processor."""
        is_cpu = self._trainer.strategy.root_device.type == "cpu"
        clock = time.thread_time if is_cpu else time.perf_counter
        began = clock()
        train_one(work)  # ends by reading its loss: nothing is left to wait for
        return max(clock() - began, 1e-9)

    def _agree(self, expected: ClientUpdate, found: ClientUpdate) -> bool:
        share = tolerance(self._trainer.precision)
        pairs = ((expected.delta, found.delta), (expected.buffers, found.buffers))
        return all(float((a - b).norm()) <= share * float(a.norm()) for a, b in pairs)


def additions(candidates: Sequence[Speedup]) -> list[tuple[Speedup, ...]]:
    """Return what to add in turn: each alone, and a compiled graph in the other layout before that.

    PyTorch's own kernels may be slower in a layout in which compiled ones are faster.
    """
    additions: list[tuple[Speedup, ...]] = [(speedup,) for speedup in candidates]
    if {"channels_last", "compiled"} <= set(candidates):
        additions.insert(-1, ("channels_last", "compiled"))
    return additions
