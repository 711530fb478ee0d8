"""Choice of a run's engine: sequential, sequential with speedups, or many clients at once in slots.

All engines give the same updates, so the choice is one of speed. It is made once, before the first
clients train, in this order, and logged in one line.

1. Speedups of a single step, one after the other, where training takes a minute or more. A compiled
   graph brings some per cent and is tried where training takes 20 minutes.
2. Slots without a compiler, if nothing rules slots out (`raise_if_impossible`) and a trial client gets
   the same update. Trying them costs a few steps; small models train 2 to 5 times as fast.
3. Compiled slots, if the remaining training takes longer than the compiler.

`Trial` says how times are measured. Checkpoints keep the choice: a resumed run does not choose again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import (
    SPEEDUPS,
    CannotPad,
    CannotStack,
    Speedup,
    StackedOptions,
)
from fl_lightning.federation.clients.in_slots import SlotEngine, raise_if_impossible
from fl_lightning.federation.clients.spot_check import FULL_PRECISIONS, TrainAlone, remark_of
from fl_lightning.federation.clients.trial import (
    Trial,
    reason_against_speedup,
    sample_of,
)
from fl_lightning.federation.options import Options
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages, overridden

# With more parameters, one client's step fills a core. A GPU needs far larger models: ten clients of a
# ViT of 2.7 million parameters trained three times as fast in slots.
_MOST_PARAMETERS, _MOST_ON_GPU = 2_000_000, 50_000_000
# Runs of fewer local steps do not repay timing one client.
LEAST_STEPS = 500
# Compiling takes 5 to 20 seconds: where slots are faster, fewer steps than this take less.
SHORT_RUN_STEPS = 10_000
# A trial of slots takes about a tenth of a second, of speedups about a second each.
SLOTS_SECONDS, SPEEDUPS_SECONDS = 0.5, 60.0
# Compiling takes 5 to 20 s and makes steps of slots 2 to 6 times as fast; a single step, some per cent.
COMPILED_SLOTS_SECONDS, COMPILED_STEP_SECONDS = 20.0, 1200.0
# Least speed, relative to sequential or plain steps, by which slots or a speedup are used.
LEAST_BY_SLOTS, LEAST_BY_SPEEDUP = 1.1, 1.03
# Most time of a measurement, as a fraction of the whole training and in seconds: of slots, and of all
# speedups together.
_SHARE, _MOST_SECONDS = 0.02, 1.0
_SHARE_OF_SPEEDUPS, _MOST_SECONDS_OF_SPEEDUPS = 0.05, 120.0


def pads(asked: bool | None, module: nn.Module) -> bool:
    """Return whether smaller batches may be padded: the option, else the module's ``loss_is_mean``.

    The attribute of a class does not hold for a subclass that overrides ``training_step``.
    """
    if asked is not None:
        return asked
    for space in (vars(module), *map(vars, type(module).__mro__)):
        if "loss_is_mean" in space:
            return bool(space["loss_is_mean"])
        if "training_step" in space:
            break
    return False


class EngineChooser:
    """Chooses the engine of a run, once.

    Args:
        run: the run.
        asked: the options of the federation.
        stages: the run's stages, which may need one client at a time.

    Raises:
        ConfigurationError: if the options name a speedup that does not apply.

    Attributes:
        slots: the engine for many clients at once; None if clients train one after the other, and before
            the choice.
        is_chosen: whether the choice has been made.
    """

    def __init__(self, run: Run, asked: Options, stages: Stages) -> None:
        correction, personal = asked.correction, asked.personal
        self._trainer, self._local, self._step = run.trainer, run.local, run.step
        self._options, self._accumulate = asked, run.accumulate
        self._stages, self._own_stages = stages, asked.stages
        self._stacking = StackedOptions(
            num_slots=1,
            padded=pads(asked.pad_batches, run.module),
            has_pull=correction is not None and correction.pull > 0,
            has_shift=correction is not None and correction.has_shift,
        )
        self._reason_against = partial(reason_against_speedup, run.step)
        self._needs_plain_steps = personal is not None and (
            personal.own_epochs is not None or personal.mixture is not None
        )
        if self._options.speedups is not None:
            self._force_speedups(self._options.speedups)
        self._kept = run.step.speedups  # after the fit the step itself has none
        self.is_chosen = self._options.engine == "sequential"
        self.slots: SlotEngine | None = None

    def choose(self, model: GlobalModel, work: Sequence[ClientWork], alone: TrainAlone) -> None:
        """Choose an engine, unless that is done or no client has work; never fails.

        Args:
            model: the global model.
            work: the work of the first cohort.
            alone: trains a client from a model sequentially, without a trace but in the module's metrics.
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
            raise_if_impossible(self._trainer, self._accumulate, self._one_at_a_time())
            slots, why = self._forced_slots(trial) if is_forced else self._faster_slots(trial)
        except (
            ClientFailure,
            ConfigurationError,
        ) as failure:  # raised again when the client trains
            rank_zero_info(f"engine: {sequential}, because a trial failed: {failure}")
        except CannotStack as reason:
            if is_forced:
                rank_zero_warn(f"engine: {sequential} and not slots as asked for: {reason}")
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
                "federation: speedups are for plain steps on the whole model, and personal.own_epochs "
                "freezes one part after the other, APFL mixes two models: leave speedups out"
            )
        for speedup in speedups:
            if reason := self._reason_against(speedup):
                raise ConfigurationError(
                    f"federation: speedups has {speedup}, but {reason}: leave it out"
                )
        self._step.use(speedups)

    def _choose_speedups(self, trial: Trial) -> str:
        """Use the speedups that pay for sequential clients; return them as text."""
        options = self._options
        if options.engine != "auto" or options.speedups is not None or self._needs_plain_steps:
            return f" with {', '.join(options.speedups)}" if options.speedups else ""
        candidates = {speedup for speedup in SPEEDUPS if self._reason_against(speedup) is None}
        if not str(self._trainer.precision).startswith("bf16"):
            candidates.discard("math_attention")
        if not candidates or trial.num_steps < LEAST_STEPS:
            return ""
        one = trial.seconds_of_longest()
        total_seconds = one * trial.num_steps
        if total_seconds < SPEEDUPS_SECONDS:
            return ""
        if total_seconds < COMPILED_STEP_SECONDS:
            candidates.discard("compiled")
        return self._measure_speedups(trial, one, total_seconds, candidates)

    def _measure_speedups(
        self, trial: Trial, one: float, total_seconds: float, candidates: Collection[Speedup]
    ) -> str:
        limit = min(_MOST_SECONDS_OF_SPEEDUPS, _SHARE_OF_SPEEDUPS * total_seconds)
        rank_zero_info(f"engine: measuring which speedups of a step pay, for {limit:.0f} s at most")
        ends, speed = time.perf_counter() + limit, 1.0
        for speedup in (speedup for speedup in SPEEDUPS if speedup in candidates):
            ratio = trial.speed_of(speedup, one) if time.perf_counter() < ends else 0.0
            if ratio >= LEAST_BY_SPEEDUP:
                self._step.use((*self._step.speedups, speedup))
                speed *= ratio
        if not self._step.speedups:
            return ""
        return f" with {', '.join(self._step.speedups)} ({speed:.2f} times the plain steps' speed)"

    def _forced_slots(self, trial: Trial) -> tuple[SlotEngine, str]:
        """Return slots, whatever their speed, and the reason as text.

        Raises:
            CannotStack: if slots do not give the sequential engine's updates.
        """
        compiled = trial.num_steps >= SHORT_RUN_STEPS
        stacking = replace(
            trial.agreeing(self._stacking),
            num_slots=self._options.slots or trial.slots_for(trial.work, compiled=compiled),
            compiled=compiled,
        )
        return SlotEngine(self._trainer, self._local, stacking), "as asked for"

    def _faster_slots(self, trial: Trial) -> tuple[SlotEngine, str]:
        """Return slots if they are faster, and the reason as text.

        Raises:
            CannotStack: if slots are not faster, or the run is too short for a trial.
        """
        size, num_steps = self._local.space.num_entries, trial.num_steps
        is_gpu = self._trainer.strategy.root_device.type == "cuda"
        if size > (_MOST_ON_GPU if is_gpu else _MOST_PARAMETERS):
            raise CannotStack(f"the steps of a model of {size:,} parameters are large enough")
        if num_steps < LEAST_STEPS:
            what = (
                "1 local step does" if round(num_steps) == 1 else f"{num_steps:.0f} local steps do"
            )
            raise CannotStack(f"{what} not repay a trial")
        one = trial.seconds_alone()
        if one * num_steps < SLOTS_SECONDS:
            raise CannotStack(f"{one * num_steps:.1f} s of training do not repay a trial")
        began = time.perf_counter()
        stacking = trial.agreeing(self._stacking)
        fitting, share = trial.stackable(stacking)
        number = self._options.slots or trial.slots_for(fitting, compiled=False)
        seconds = min(_MOST_SECONDS, _SHARE * one * num_steps)
        sample = sample_of(fitting, number, math.ceil(seconds / one))
        engine, in_slots = trial.seconds_in_slots(replace(stacking, num_slots=number), sample)
        left = num_steps * (min(one, in_slots) * share + one * (1 - share))
        if is_long := left >= COMPILED_SLOTS_SECONDS:
            rank_zero_info("engine: compiling a step of many clients at once, for 5 to 20 s")
            number = self._options.slots or trial.slots_for(fitting, compiled=True)
            stacking = replace(engine.stacking, num_slots=number, compiled=True)
            compiled, seconds = trial.seconds_in_slots(stacking, sample)
            if seconds < in_slots:
                engine, in_slots = compiled, seconds
        ratio = 1 / (share * in_slots / one + 1 - share)
        spent = time.perf_counter() - began
        if ratio < LEAST_BY_SLOTS:
            number = engine.stacking.num_slots
            raise CannotStack(f"{number} slots were measured at {ratio:.2f} times its speed")
        why = f"measured at {ratio:.1f} times the sequential speed"
        if engine.stacking.compiled and engine.is_compiled:
            return engine, f"{why}, compiled in {spent:.0f} s"
        how = f"tried for {spent:.0f} s" if is_long else f"for {left:.0f} s of training"
        return engine, f"{why}, not compiled, {how}"

    def _remark(self, is_direct: bool) -> str:
        """Return a remark if layers are computed more precisely than the Trainer asks for."""
        is_more = is_direct and self._trainer.precision not in FULL_PRECISIONS
        return ", direct layers in float32" if is_more else ""

    def _one_at_a_time(self) -> str | None:
        """Return the part of the configuration that needs one client at a time; None without one."""
        if self._stages.one_at_a_time is not None:
            return self._stages.one_at_a_time
        for stage in self._own_stages:
            if overridden(stage, "around", "steps"):
                return f"the stage {type(stage).__name__} acts while one client trains"
        buffers = dict(self._trainer.lightning_module.named_buffers())
        frozen = [name for name in self._local.buffers.names if name not in buffers]
        return f"its clients change the frozen parameter {frozen[0]}" if frozen else None

    def fall_back(self, reason: CannotStack) -> None:
        """Choose and log another engine, after slots have failed."""
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
        """Rebuild the chosen engine for changed masks."""
        if self.slots is not None:
            self.slots = SlotEngine(self._trainer, self._local, self.slots.stacking)

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen engine, for a checkpoint."""
        return {
            "is_chosen": self.is_chosen,
            "slots": None if self.slots is None else asdict(self.slots.stacking),
            "speedups": list(self._kept),
            "names": dict(self._local.collector.epoch_names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the choice of a resumed run or of another process."""
        if self._options.engine == "sequential" or not state["is_chosen"]:
            return
        self.is_chosen = True
        if self._options.speedups is None:
            self._step.use(state["speedups"])
            self._kept = self._step.speedups
        self._local.collector.epoch_names.update(state["names"])
        if state["slots"] is not None:
            self.slots = SlotEngine(self._trainer, self._local, StackedOptions(**state["slots"]))
