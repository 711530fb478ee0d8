"""How clients are trained: one after the other, or many at once in slots.

Both give the same updates, so the choice is one of speed. Slots are several times faster for small
models, whose steps are too small to keep the hardware busy, but their step must be compiled first.
``auto`` asks whether slots are possible and the run long enough to repay the compiler, and then
measures; before, it finds the speedups that pay one after the other. What was chosen, and why, is
said in one line and kept in the checkpoint: a resumed run does not choose again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import CannotPad, CannotStack
from fl_lightning.federation.clients.engine_options import FULL_PRECISIONS
from fl_lightning.federation.clients.in_slots import (
    SlotEngine,
    Stacking,
    TrainOne,
    raise_if_impossible,
)
from fl_lightning.federation.clients.spot_check import SpotRate
from fl_lightning.federation.clients.trial import SlotTrial, SpeedupTrial
from fl_lightning.federation.options import Options
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages, overridden


class EngineChooser:
    """Chooses once in a run.

    Args:
        run: whose clients train.
        asked: what was asked for.
        stages: some of which may need one client at a time.

    Raises:
        ConfigurationError: if a speedup was asked for that does not apply.

    Attributes:
        slots: the engine for many at once; None while, and if, clients train one after the other.
        is_settled: whether the choice has been made.
        spot_rate: how many clients of slots are trained both ways.
    """

    def __init__(self, run: Run, asked: Options, stages: Stages) -> None:
        correction, personal = asked.correction, asked.personal
        trainer, local, step, options = run.trainer, run.local, run.step, asked.execution
        self._stages, self._own_stages = stages, asked.stages
        stacking = Stacking(
            num_slots=1,
            padded=options.pads(run.module),
            has_pull=correction is not None and correction.pull > 0,
            has_shift=correction is not None and correction.has_shift,
        )
        self._trial = SlotTrial(trainer, local, stacking, options.num_slots)
        changes_loss = correction is not None and correction.changes_loss
        self._trainer, self._local, self._step = trainer, local, step
        self._speedups = SpeedupTrial(trainer, step, adds_to_loss=changes_loss)
        self._needs_plain_steps = personal is not None and (
            personal.own_epochs is not None or personal.mixture is not None
        )
        if options.speedups and self._needs_plain_steps:
            raise ConfigurationError(
                "federation: speedups are for plain steps on the whole model, and personal.own_epochs "
                "freezes one part after the other, APFL mixes two models: leave speedups out"
            )
        if options.speedups is not None:
            self._speedups.force(options.speedups)
        self._kept = step.speedups  # after the fit the step itself has none
        self._options, self._accumulate = options, run.accumulate
        self.is_settled = options.engine == "sequential"
        self.slots: SlotEngine | None = None
        self.spot_rate = SpotRate(options.spot_check)

    def choose(self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne) -> None:
        """Choose, if that has not been done and there is any work to choose by; never fails.

        Args:
            model: the global model.
            work: of the first group of clients.
            train_one: trains a client sequentially; only the module's metrics remember it.
        """
        work = [client for client in work if client.sizes]
        if self.is_settled or not work:
            return
        self.is_settled = True
        metrics = MetricStates(metrics_of(self._trainer.lightning_module))
        sequential = "sequential"
        try:
            sequential += self._choose_speedups(work, train_one)
            sequential += self._remark("direct_layers" in self._step.speedups)
            raise_if_impossible(self._trainer, self._accumulate, self._one_at_a_time())
            if self._options.engine == "slots":
                self.slots, why = self._trial.force(model, work, train_one), "as asked for"
            else:
                self.slots, why = self._trial.measure(model, work, train_one)
        except (
            ClientFailure,
            ConfigurationError,
        ) as failure:  # it will be met again, where it counts
            rank_zero_info(f"engine: {sequential}, because a trial failed: {failure}")
        except CannotStack as reason:
            if self._options.engine == "slots":
                rank_zero_warn(f"engine: {sequential} and not slots as asked for: {reason}")
            else:
                rank_zero_info(f"engine: {sequential}, because {reason}")
        else:
            if self._options.speedups is None:
                self._step.use(())
            self.spot_rate.times_faster = self._trial.times_faster
            why += self._remark(self.slots.stacking.direct) + self._whole(self.slots, work)
            why += self.spot_rate.remark
            rank_zero_info(f"engine: {self.slots.stacking.num_slots} slots, {why}")
        finally:
            metrics.put_back()
        self._kept = self._step.speedups

    def _remark(self, is_direct: bool) -> str:
        """Say where layers are computed more precisely than asked for."""
        is_more = is_direct and self._trainer.precision not in FULL_PRECISIONS
        return ", direct layers in float32" if is_more else ""

    def _whole(self, slots: SlotEngine, work: Sequence[ClientWork]) -> str:
        """Say why batches are not padded, or what that would bring."""
        if slots.stacking.whole_because:
            return f", of whole batches because {slots.stacking.whole_because}"
        without = len(slots.split(GroupWork.of(work))[1])
        if not without or self._options.pad_batches is False:
            return ""
        return (
            f", {without} of {len(work)} clients one after the other because none of their batches is "
            "full (federation.pad_batches pads them, for a loss that is a mean over examples)"
        )

    def _one_at_a_time(self) -> str | None:
        """Return what in the configuration is done for one client at a time; None if nothing."""
        if self._stages.one_at_a_time is not None:
            return self._stages.one_at_a_time
        for stage in self._own_stages:
            if overridden(stage, "around", "steps"):
                return f"the stage {type(stage).__name__} acts while one client trains"
        buffers = dict(self._trainer.lightning_module.named_buffers())
        frozen = [name for name in self._local.buffers.names if name not in buffers]
        return f"its clients change the frozen parameter {frozen[0]}" if frozen else None

    def _choose_speedups(self, work: Sequence[ClientWork], train_one: TrainOne) -> str:
        """Settle the speedups of clients that train one after the other; return it in words."""
        options = self._options
        if options.engine != "auto" or options.speedups is not None or self._needs_plain_steps:
            return f" with {', '.join(options.speedups)}" if options.speedups else ""
        return self._speedups.choose(work, train_one, self._trial.num_steps(work))

    def fall_back(self, reason: CannotStack) -> None:
        """Choose another engine after slots have met what they cannot do, and say so.

        Args:
            reason: what it was.
        """
        assert self.slots is not None
        whole = self.slots.whole(reason) if isinstance(reason, CannotPad) else None
        is_whole, self.slots = whole is not None, whole
        how = "slots of whole batches" if is_whole else "sequential"
        text = f"engine: {how} from round {self._trainer.current_epoch} on, because {reason}"
        if self._options.engine == "slots" and not is_whole:
            rank_zero_warn(text)
        else:
            rank_zero_info(text)

    def renew(self) -> None:
        """Keep the choice where other parameters move than when it was made."""
        if self.slots is not None:
            self.slots = SlotEngine(self._trainer, self._local, self.slots.stacking)

    def state_dict(self) -> dict[str, Any]:
        """Return what was chosen."""
        return {
            "is_settled": self.is_settled,
            "slots": None if self.slots is None else asdict(self.slots.stacking),
            "speedups": list(self._kept),
            "times_faster": self.spot_rate.times_faster,
            "names": dict(self._local.collector.epoch_names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep to what the run that is resumed, or another process, has chosen."""
        if self._options.engine == "sequential" or not state["is_settled"]:
            return
        self.is_settled = True
        if self._options.speedups is None:
            self._step.use(state.get("speedups", ()))
            self._kept = self._step.speedups
        self._local.collector.epoch_names.update(state["names"])
        self.spot_rate.times_faster = state.get("times_faster")
        if state["slots"] is not None:
            self.slots = SlotEngine(self._trainer, self._local, Stacking(**state["slots"]))
