"""Which speedups of a local step to use: those asked for, or those that a trial found to pay.

A trial adds one speedup after the other, and keeps it if a client's update is still the same and
its steps take less time, both ways measured in turn. A compiled graph is tried in the other memory
layout as well.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.engines import SPEEDUPS, NotCompiled, Speedup, reason_against
from fl_lightning.federation.execution.engine_options import tolerance
from fl_lightning.federation.visits.lightning_step import LightningStep, extra_work

TrainOne = Callable[[ClientWork], ClientUpdate]

# What trains for less time or fewer steps does not repay a trial.
_SHORT_RUN_SECONDS = 60.0
_SHORT_RUN_STEPS = 1000
# Of what is to be trained, the share that a trial may take, and its most seconds.
_SHARE, _MOST_SECONDS = 0.05, 120.0
# Compiling takes 2 to 17 seconds, and brings some per cent.
_COMPILER_SECONDS = 1200.0
# What a speedup must bring, so that it is not noise.
_LEAST_RATIO = 1.03
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
        limit = min(_MOST_SECONDS, _SHARE * one * num_steps)
        self._ends = time.perf_counter() + limit
        rank_zero_info(f"engine: measuring which speedups of a step pay, for {limit:.0f} s at most")
        expected, total, remarks = train_one(sample.head(2)), 1.0, ""
        for added in additions(candidates):
            before = self._step.speedups
            if set(added) & set(before) or time.perf_counter() > self._ends:
                continue
            ratio, remark = self._tried(before, added, sample, train_one, expected)
            pays = ratio >= _LEAST_RATIO
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
