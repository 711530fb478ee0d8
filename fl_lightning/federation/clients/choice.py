"""Choice of a run's engine: sequential, sequential with speedups, or many clients at once in slots.

All engines give the same updates, so the choice is one of speed. It is made once, before the first
clients train, and logged in one line. ``engine: auto`` begins with plain sequential steps and tries, in this
order, what may be faster. Each is tried only if the training ahead is long enough to repay the trial. It is
used if a client's result is that of sequential training (`Trial`) and if it is faster:

1. Speedups of a single step, one after the other, if training takes a minute or more. A compiled graph
   brings some per cent, and is tried if training takes 20 minutes.
2. Slots that are not compiled, if nothing rules slots out (`raise_if_impossible`). A trial of them takes
   about a tenth of a second, and small models train 2 to 5 times as fast.
3. Compiled slots, if training still takes longer than the compiler.

`Trial` says how times are measured. Checkpoints keep the choice: a run that resumes with the same options does
not choose again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import SPEEDUPS, CannotPad, CannotStack, Speedup, StackedOptions
from fl_lightning.federation.clients.in_slots import (
    SlotEngine,
    fitting_slots,
    one_at_a_time,
    pads,
    raise_if_impossible,
)
from fl_lightning.federation.clients.spot_check import FULL_PRECISIONS, TrainAlone, remark_of
from fl_lightning.federation.clients.trial import Trial, Way
from fl_lightning.federation.options import Options
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages

# Largest number of parameters for slots: the step of a larger model keeps a core busy by itself. A GPU needs
# far larger models: ten clients of a ViT of 2.7 million parameters trained three times as fast in slots.
_MOST_PARAMETERS, _MOST_ON_GPU = 2_000_000, 50_000_000
# Runs of fewer local steps take about half a second in small models, and do not repay a trial.
LEAST_STEPS = 1000
# With ``engine: slots``, fewest local steps of a run for which slots are compiled.
SHORT_RUN_STEPS = 10_000
# Seconds of training that repay a trial: of a speedup (a second), of a compiled step and of compiled slots
# (15 to 60 s where nothing is cached). A compiled step is some per cent faster, compiled slots are 2 to 6
# times as fast.
SPEEDUP_SECONDS, COMPILED_STEP_SECONDS, COMPILED_SLOTS_SECONDS = 60.0, 1200.0, 60.0
# Longest time of all trials of speedups: as a fraction of the training, and in seconds.
SHARE_OF_SPEEDUPS, MOST_SECONDS_OF_SPEEDUPS = 0.05, 120.0
# Fraction of the run's local steps that one turn of a trial of slots takes: 2 to 10 steps of each client.
_SHARE_OF_A_TURN = 0.005
# Smallest speed, relative to sequential training (or to plain steps), for which slots (or a speedup) are used.
LEAST_BY_SLOTS, LEAST_BY_SPEEDUP = 1.1, 1.03


class EngineChooser:
    """Chooses once how a run's clients train: sequentially, with speedups, or many at once in slots.

    Raises:
        ConfigurationError: if the options name a speedup that does not apply.

    Attributes:
        slots: the engine for many clients at once; None for sequential training, and before the choice.
        is_chosen: whether the choice has been made.
    """

    def __init__(self, run: Run, asked: Options, stages: Stages) -> None:
        correction, personal = asked.correction, asked.personal
        self._trainer, self._local, self._step = run.trainer, run.local, run.step
        self._options, self._accumulate, self._stages = asked, run.accumulate, stages
        self._asked = [asked.engine, asked.pad_batches]
        self._stacking = StackedOptions(
            num_slots=1,
            padded=pads(asked.pad_batches, run.module),
            has_pull=correction is not None and correction.pull > 0,
            has_shift=correction is not None and correction.has_shift,
        )
        self._needs_plain_steps = personal is not None and (
            personal.own_epochs is not None or personal.mixture is not None
        )
        if self._options.speedups is not None:
            self._force_speedups(self._options.speedups)
        self._kept = run.step.speedups  # after the fit the step itself has none
        self.is_chosen = self._options.engine == "sequential"
        self.slots: SlotEngine | None = None

    def choose(self, model: GlobalModel, work: Sequence[ClientWork], alone: TrainAlone) -> None:
        """Choose and log how clients train, unless that has been chosen or no client has work; never fails.

        Args:
            model: the global model.
            work: the work of the first cohort.
            alone: trains a client from a model sequentially, changing nothing but the module and its metrics.
        """
        work = [client for client in work if client.sizes]
        if self.is_chosen or not work:
            return
        self.is_chosen = True
        metrics = MetricStates(metrics_of(self._trainer.lightning_module))
        trial = Trial(self._trainer, self._local, self._step, model, work, alone)
        is_forced, sequential = self._options.engine == "slots", "sequential"
        try:
            sequential += self._choose_speedups(trial)
            sequential += self._remark("direct_layers" in self._step.speedups)
            reason = one_at_a_time(self._trainer, self._local, self._stages, self._options.stages)
            raise_if_impossible(self._trainer, self._accumulate, reason)
            slots, why = self._forced_slots(trial) if is_forced else self._faster_slots(trial)
        except (
            ClientFailure,
            ConfigurationError,
        ) as failure:  # raised again when the client trains
            rank_zero_info(f"engine: {sequential}, because a trial failed: {failure}")
        except CannotStack as reason:
            if is_forced:
                rank_zero_warn(f"engine: {sequential}, not slots as asked for, because {reason}")
            else:
                rank_zero_info(f"engine: {sequential}, because {reason}")
        else:
            self.slots = slots
            if self._options.speedups is None:
                self._step.use(())
            why += self._remark(slots.stacking.direct)
            why += slots.remark(work, may_pad=self._options.pad_batches is not False)
            why += remark_of(self._options.spot_check)
            rank_zero_info(f"engine: {slots.stacking.num_slots} slots, {why}")
        finally:
            metrics.put_back()
        self._kept = self._step.speedups

    def _force_speedups(self, speedups: Sequence[Speedup]) -> None:
        if speedups and self._needs_plain_steps:
            raise ConfigurationError(
                "federation: speedups need plain steps on the whole model, but personal.own_epochs trains one "
                "part after the other, and APFL mixes two models: leave speedups out"
            )
        for speedup in speedups:
            if reason := self._step.reason_against(speedup):
                raise ConfigurationError(
                    f"federation: speedups has {speedup}, but {reason}: leave it out"
                )
        self._step.use(speedups)

    def _choose_speedups(self, trial: Trial) -> str:
        """Switch on the speedups that make sequential training faster; return their names as text."""
        options, num_steps = self._options, trial.num_steps
        if options.engine != "auto" or options.speedups is not None or self._needs_plain_steps:
            return f" with {', '.join(options.speedups)}" if options.speedups else ""
        is_half = str(self._trainer.precision).startswith("bf16")
        candidates = [
            speedup
            for speedup in SPEEDUPS
            if (is_half or speedup != "math_attention") and not self._step.reason_against(speedup)
        ]
        if not candidates or num_steps < LEAST_STEPS:
            return ""
        (one,) = trial.seconds(Way([trial.longest.head(1)]), turns=2)
        if one * num_steps < SPEEDUP_SECONDS:
            return ""
        limit = min(MOST_SECONDS_OF_SPEEDUPS, SHARE_OF_SPEEDUPS * one * num_steps)
        rank_zero_info(
            f"engine: measuring which speedups make steps faster, for {limit:.0f} s at most"
        )
        ends, speed = time.perf_counter() + limit, 1.0
        for speedup in candidates:
            is_short = speedup == "compiled" and one * num_steps < COMPILED_STEP_SECONDS
            if is_short or time.perf_counter() > ends:
                continue
            ratio = trial.speed_of(speedup, one)
            if ratio >= LEAST_BY_SPEEDUP:
                self._step.use((*self._step.speedups, speedup))
                speed *= ratio
        if not self._step.speedups:
            return ""
        return f" with {', '.join(self._step.speedups)} ({speed:.2f} times the plain steps' speed)"

    def _forced_slots(self, trial: Trial) -> tuple[SlotEngine, str]:
        """Return a slot engine (trains many clients at once), whatever its speed, and the reason for the log.

        Raises:
            CannotStack: if slots do not give the sequential engine's updates.
        """
        stacking = trial.agreeing(self._stacking)
        is_long = trial.num_steps >= SHORT_RUN_STEPS
        return self._slots_for(trial.work, stacking, compiled=is_long), "as asked for"

    def _faster_slots(self, trial: Trial) -> tuple[SlotEngine, str]:
        """Return a slot engine if it is faster than sequential training, and the reason for the log.

        Raises:
            CannotStack: if slots are not faster, or the run is too short for a trial.
        """
        size, num_steps = self._local.space.num_entries, trial.num_steps
        is_gpu = self._trainer.strategy.root_device.type == "cuda"
        if size > (_MOST_ON_GPU if is_gpu else _MOST_PARAMETERS):
            raise CannotStack(f"steps of a model of {size:,} parameters gain nothing from slots")
        if num_steps < LEAST_STEPS:
            what = (
                "1 local step does" if round(num_steps) == 1 else f"{num_steps:.0f} local steps do"
            )
            raise CannotStack(f"{what} not repay a trial")
        began = time.perf_counter()
        stacking, work = trial.agreeing(self._stacking), GroupWork.of(trial.work)
        fitting, _ = SlotEngine(self._trainer, self._local, stacking).split(work)
        share = float(fitting.num_steps.sum() / work.num_steps.sum())  # of steps that slots take
        engine = self._slots_for(fitting, stacking, compiled=False)
        number = engine.stacking.num_slots
        length = int(min(10, max(2, _SHARE_OF_A_TURN * num_steps / number)))
        sample = [client.head(length) for client in fitting[:number]]
        few = sample[:: math.ceil(len(sample) / 4)]
        sequential = Way(few, speedups=self._step.speedups)
        one, in_slots = trial.seconds(sequential, Way(sample, engine))
        ahead = num_steps * (min(one, in_slots) * share + one * (1 - share))
        if is_long := ahead >= COMPILED_SLOTS_SECONDS:
            rank_zero_info("engine: compiling a step of many clients at once, for up to a minute")
            compiled = self._slots_for(fitting, stacking, compiled=True)
            (seconds,) = trial.seconds(Way(sample, compiled))
            if seconds < in_slots:
                engine, in_slots = compiled, seconds
        ratio = 1 / (share * in_slots / one + 1 - share)
        spent = time.perf_counter() - began
        if ratio < LEAST_BY_SLOTS:
            number = engine.stacking.num_slots
            raise CannotStack(f"{number} slots have {ratio:.2f} times the sequential speed")
        why = f"measured at {ratio:.1f} times the sequential speed"
        if engine.stacking.compiled and engine.is_compiled:
            return engine, f"{why}, compiled in {spent:.0f} s"
        how = f"tried for {spent:.0f} s" if is_long else f"for {ahead:.0f} s of training"
        return engine, f"{why}, not compiled, {how}"

    def _slots_for(
        self, work: Sequence[ClientWork], stacking: StackedOptions, *, compiled: bool
    ) -> SlotEngine:
        """Return a slot engine with as many slots as memory and clients allow, or fewer if that takes no longer.

        Clients with equal numbers of steps end together: for 100 clients, 32 slots need four turns, as do 25.
        """
        size = self._local.space.num_entries
        number = min(fitting_slots(self._trainer, size, compiled=compiled), len(work))
        if len({len(client.sizes) for client in work}) == 1:
            number = math.ceil(len(work) / math.ceil(len(work) / number))
        stacking = replace(stacking, num_slots=self._options.slots or number, compiled=compiled)
        return SlotEngine(self._trainer, self._local, stacking)

    def _remark(self, is_direct: bool) -> str:
        """Return a remark for the log if layers are computed in higher precision than the Trainer's."""
        is_more = is_direct and self._trainer.precision not in FULL_PRECISIONS
        return ", direct layers in float32" if is_more else ""

    def fall_back(self, reason: CannotStack) -> None:
        """Choose and log another engine, after slots could not run a training step."""
        assert self.slots is not None
        whole = self.slots.whole(reason) if isinstance(reason, CannotPad) else None
        is_whole, self.slots = whole is not None, whole
        how = "slots of whole batches" if is_whole else "sequential"
        text = f"engine: {how} from round {self._trainer.current_epoch + 1} on, because {reason}"
        if self._options.engine == "slots" and not is_whole:
            rank_zero_warn(text)
        else:
            rank_zero_info(text)

    def renew(self) -> None:
        """Rebuild the slot engine, if it was chosen, because masks have changed."""
        if self.slots is not None:
            self.slots = SlotEngine(self._trainer, self._local, self.slots.stacking)

    def state_dict(self) -> dict[str, Any]:
        """Return how clients train (engine, slots, speedups), for a checkpoint."""
        return {
            "asked": self._asked,
            "is_chosen": self.is_chosen,
            "slots": None if self.slots is None else asdict(self.slots.stacking),
            "speedups": list(self._kept),
            "names": dict(self._local.collector.epoch_names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the engine of a resumed run or of another process, unless it was chosen under other options."""
        is_same = state.get("asked", self._asked) == self._asked
        if self.is_chosen or not (state["is_chosen"] and is_same):
            return
        self.is_chosen = True
        if self._options.speedups is None:
            self._step.use(state["speedups"])
            self._kept = self._step.speedups
        self._local.collector.epoch_names.update(state["names"])
        if state["slots"] is not None:
            stacking = StackedOptions(**state["slots"])
            stacking = replace(stacking, num_slots=self._options.slots or stacking.num_slots)
            self.slots = SlotEngine(self._trainer, self._local, stacking)
