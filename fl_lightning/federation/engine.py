"""How clients are trained: one after the other, or many at once in slots.

Both give the same updates, so the choice is one of speed. Slots are several times faster for small
models, whose steps are too small to keep the hardware busy, but their step must be compiled first.
``auto`` asks whether slots are possible and the run long enough to repay the compiler, and then
measures; before, it finds the speedups that pay one after the other. What was chosen, and why, is
said in one line and kept in the checkpoint: a resumed run does not choose again.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from fl_lightning.client.apfl import APFL
from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.correction import Correction
from fl_lightning.client.fedlc import FedLC
from fl_lightning.client.local_training import GlobalModel, LocalTrainer
from fl_lightning.client.moon import Moon
from fl_lightning.client.personalisation import Personalisation
from fl_lightning.client.speedups import SPEEDUPS, Speedup
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.federation.lightning_step import LightningStep
from fl_lightning.federation.slot_engine import (
    MOST_SLOTS,
    SlotEngine,
    Stacking,
    TrainOne,
    agreeing,
    fitting_slots,
    raise_if_impossible,
)
from fl_lightning.federation.slot_tuning import Remembered, fastest
from fl_lightning.federation.speedup_trial import SpeedupTrial

EngineName = Literal["auto", "sequential", "slots"]

# One client's step of a larger model fills a core by itself.
MOST_PARAMETERS = 2_000_000
# Compiling takes 5 to 20 seconds: less local training than this does not repay it, and fewer
# steps than this do not take so long where slots are faster.
SHORT_RUN_SECONDS = 60.0
SHORT_RUN_STEPS = 10_000
# Trying out several numbers of slots means as many compilations.
LONG_RUN_SECONDS = 600.0
# What one run of a trial would take one client after the other.
_TRIAL_SECONDS = 1.0


@dataclass(frozen=True)
class EngineOptions:
    """What the user asked for.

    Attributes:
        engine: how clients train.
        num_slots: clients at once; chosen by size if None.
        speedups: of the steps of clients that train one after the other; if None, ``auto``
            measures and the other engines use none.
    """

    engine: EngineName = "auto"
    num_slots: int | None = None
    speedups: tuple[Speedup, ...] | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "sequential", "slots"):
            raise ConfigurationError(
                f"federation: engine must be auto, sequential or slots, got {self.engine!r}"
            )
        if self.num_slots is not None and self.num_slots < 1:
            raise ConfigurationError(
                f"federation: slots must be at least 1 client at once, got {self.num_slots}"
            )
        given = self.speedups or ()
        if not set(given) <= set(SPEEDUPS) or len(set(given)) < len(given):
            raise ConfigurationError(
                f"federation: speedups must be some of {', '.join(SPEEDUPS)}, each once, or null "
                f"to have them measured, got {list(given)}"
            )


def trains_in_large_groups(options: EngineOptions, module: nn.Module, num_steps: float) -> bool:
    """Return whether a round's clients should come in one group, so that slots can pack them.

    Args:
        options: what was asked for.
        module: the model.
        num_steps: local steps of the whole run, about.
    """
    if options.engine != "auto" or num_steps < SHORT_RUN_STEPS:
        return options.engine == "slots"
    params = [p for p in module.parameters() if p.requires_grad]
    if any(isinstance(p, nn.UninitializedParameter) for p in params):
        return False
    return sum(p.numel() for p in params) <= MOST_PARAMETERS


class EngineChooser:
    """Chooses once in a run.

    Args:
        trainer: set up for fitting.
        local: the sequential engine.
        step: its local step.
        options: what was asked for.
        accumulate: batches per local step.
        correction: what clients add to their gradients; None for nothing.
        personal: what they have for themselves; None for nothing.

    Raises:
        ConfigurationError: if a speedup was asked for that does not apply.

    Attributes:
        slots: the engine for many at once; None while, and if, clients train one after the other.
        is_settled: whether the choice has been made.
    """

    def __init__(
        self,
        trainer: Trainer,
        local: LocalTrainer,
        step: LightningStep,
        options: EngineOptions,
        accumulate: int,
        correction: Correction | None = None,
        personal: Personalisation | None = None,
    ) -> None:
        self._apart = personal is not None and (personal.beside or personal.own_epochs is not None)
        self._corrects = {
            "has_pull": correction is not None and correction.pull > 0,
            "has_shift": correction is not None and correction.has_shift,
        }
        self._changes_loss = isinstance(correction, (Moon, FedLC))
        self._trainer, self._local, self._step = trainer, local, step
        self._speedups = SpeedupTrial(trainer, step, adds_to_loss=self._changes_loss)
        self._needs_plain_steps = personal is not None and (
            personal.own_epochs is not None or isinstance(personal, APFL)
        )
        if options.speedups and self._needs_plain_steps:
            raise ConfigurationError(
                "federation: speedups are for plain steps on the whole model, and personal.own_epochs "
                "freezes one part after the other, APFL mixes two models: leave speedups out"
            )
        if options.speedups is not None:
            self._speedups.force(options.speedups)
        self._kept = step.speedups  # after the fit the step itself has none
        self._options, self._accumulate = options, accumulate
        self.is_settled = options.engine == "sequential"
        self.slots: SlotEngine | None = None

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
            raise_if_impossible(self._trainer, self._accumulate, self._one_at_a_time())
            if self._options.engine == "slots":
                self.slots, why = self._forced(model, work, train_one), "as asked for"
            else:
                self.slots, why = self._measured(model, work, train_one)
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
            rank_zero_info(f"engine: {self.slots.stacking.num_slots} slots, {why}")
        finally:
            metrics.put_back()
        self._kept = self._step.speedups

    def _one_at_a_time(self) -> str | None:
        """Return what in the configuration is done for one client at a time; None if nothing."""
        if self._changes_loss:
            return "its correction changes the loss of one model at a time"
        return "clients take steps of their own (federation.personal)" if self._apart else None

    def _choose_speedups(self, work: Sequence[ClientWork], train_one: TrainOne) -> str:
        """Settle the speedups of clients that train one after the other; return it in words."""
        options = self._options
        if options.engine != "auto" or options.speedups is not None or self._needs_plain_steps:
            return f" with {', '.join(options.speedups)}" if options.speedups else ""
        return self._speedups.choose(work, train_one, self._num_steps(work))

    def _forced(
        self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
    ) -> SlotEngine:
        num_slots = self._options.num_slots or self._fitting_slots(work)
        weighted = agreeing(self._trainer, self._local, model, work, train_one)
        compiled = self._num_steps(work) >= SHORT_RUN_STEPS
        stacking = Stacking(num_slots, weighted, compiled, **self._corrects)
        return SlotEngine(self._trainer, self._local, stacking)

    def _measured(
        self, model: GlobalModel, work: Sequence[ClientWork], train_one: TrainOne
    ) -> tuple[SlotEngine, str]:
        num_steps, size = self._num_steps(work), self._local.space.num_entries
        if num_steps < SHORT_RUN_STEPS:
            raise CannotStack(f"{num_steps:.0f} local steps do not repay a compiler")
        if size > MOST_PARAMETERS:
            raise CannotStack(f"the steps of a model of {size:,} parameters are large enough")
        sample = max(work, key=lambda client: len(client.sizes)).head(10)
        one = _seconds(lambda: train_one(sample)) / len(sample.sizes)
        if one * num_steps < SHORT_RUN_SECONDS:
            raise CannotStack(f"{one * num_steps:.0f} s of training do not repay a compiler")
        weighted = agreeing(self._trainer, self._local, model, work, train_one)
        trial = _shortened(work, max_steps=math.ceil(_TRIAL_SECONDS / one))
        engines: dict[int, SlotEngine] = {}

        def seconds(num_slots: int) -> float:
            stacking = Stacking(num_slots, weighted, compiled=True, **self._corrects)
            engines[num_slots] = SlotEngine(self._trainer, self._local, stacking)
            list(engines[num_slots].train(model, trial))  # compiles
            return _seconds(lambda: list(engines[num_slots].train(model, trial)))

        began = time.perf_counter()
        num_slots = self._number(work, seconds, is_long=one * num_steps > LONG_RUN_SECONDS)
        if num_slots not in engines:
            seconds(num_slots)
        ratio = _times_faster(trial, train_one, lambda w: list(engines[num_slots].train(model, w)))
        spent = time.perf_counter() - began
        if ratio < 1.1:
            raise CannotStack(f"{num_slots} slots were measured at {ratio:.2f} times its speed")
        return (
            engines[num_slots],
            f"measured at {ratio:.1f} times the sequential speed, compiled in {spent:.0f} s",
        )

    def _number(
        self, work: Sequence[ClientWork], seconds: Callable[[int], float], *, is_long: bool
    ) -> int:
        """Return how many slots to take: as told, as remembered, tried out, or by size."""
        if self._options.num_slots is not None:
            return self._options.num_slots
        start = self._fitting_slots(work)
        if not is_long:
            return start
        remembered, key = Remembered(), self._key(len(work))
        found = remembered.get(key)
        if found is None:
            found = fastest(seconds, start, len(work))
            remembered.put(key, found)
        return min(found, len(work))

    def _key(self, num_clients: int) -> str:
        """Name what the best number of slots depends on."""
        trainer = self._trainer
        parts = (
            self._local.space.fingerprint(),
            trainer.datamodule.batch_size,  # type: ignore[attr-defined]
            type(trainer.optimizers[0]).__name__,
            trainer.precision,
            str(trainer.strategy.root_device),
            platform.processor() or platform.machine(),
            torch.get_num_threads(),
            torch.__version__,
            min(num_clients, MOST_SLOTS),
        )
        return " ".join(map(str, parts))

    def _fitting_slots(self, work: Sequence[ClientWork]) -> int:
        return min(fitting_slots(self._trainer, self._local.space.num_entries), len(work))

    def _num_steps(self, work: Sequence[ClientWork]) -> float:
        """Return about how many local steps the whole run has; it is not shorter when resumed."""
        rounds = self._trainer.max_epochs
        if rounds is None or rounds < 0:
            return math.inf
        return rounds * self._trainer.num_training_batches * sum(len(w.sizes) for w in work)

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
        if state["slots"] is not None:
            self.slots = SlotEngine(self._trainer, self._local, Stacking(**state["slots"]))


def _shortened(work: Sequence[ClientWork], max_steps: int) -> list[ClientWork]:
    """Return clients' first steps, in proportion to all that they have."""
    share = min(1.0, max_steps / sum(len(client.sizes) for client in work))
    return [c.head(max(1, round(share * len(c.sizes)))) for c in work[:max_steps]]


def _times_faster(
    work: Sequence[ClientWork],
    train_one: TrainOne,
    train_all: Callable[[Sequence[ClientWork]], Any],
) -> float:
    """Return how many times faster clients train together than one after the other.

    Both take turns, so that what else slows the machine down for a while slows both.
    """
    alone = work[:: -(-len(work) // 20)]
    share = sum(len(w.sizes) for w in alone) / sum(len(w.sizes) for w in work)
    ratios = []
    for _ in range(5):
        began = time.perf_counter()
        for client in alone:
            train_one(client)
        between = time.perf_counter()
        train_all(work)
        ratios.append((between - began) / share / (time.perf_counter() - between))
    return median(ratios)


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
