"""Trials before a run: clients train with several engines, to compare results and times.

An engine passes if a client's update, buffers, personal tensors, logged values (see `difference`) and
torchmetrics objects differ by rounding only; with padding, on batches of several sizes.

Times are the shortest of three, of this thread's computation (`time.thread_time`), so that other
processes do not count unless they fill cache or memory bus. On a GPU it is wall time. `EngineChooser`
decides by these times.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import (
    CannotPad,
    CannotStack,
    Speedup,
    StackedOptions,
    reason_against,
    usable_rows,
)
from fl_lightning.federation.clients.in_slots import SlotEngine, cannot_run, fitting_slots
from fl_lightning.federation.clients.spot_check import (
    Rounding,
    TrainAlone,
    TrainedClient,
    difference,
)
from fl_lightning.federation.visits.lightning_step import LightningStep, extra_work
from fl_lightning.kernels import reason_against_direct_layers
from fl_lightning.server.means.running_mean import RunningMean

_TURNS = 3
# Relative difference by which the states of a torchmetrics object may differ.
_LEAST_SHARE = 1e-3
# Repetitions of a trial of a speedup, which differ by a few per cent.
_TURNS_OF_SPEEDUPS = 7
# Approximate seconds for which one client's steps are timed.
SECONDS_OF_A_TURN = 0.1
# Approximate number of batch sizes in a trial of padding.
_MOST_SIZES = 4
_NO_FULL_BATCH = (
    "no client has a full batch (federation.pad_batches pads smaller ones, for a loss that is a mean over "
    "examples)"
)


@dataclass(frozen=True)
class Trial:
    """Trains clients without a trace, to compare engines.

    Args:
        trainer: a Trainer, set up for fitting.
        local: the sequential engine.
        step: the local step of the sequential engine.
        model: the global model.
        work: the work of clients, with at least a batch each.
        alone: trains a client from a model sequentially, without a trace but in the module's metrics.
    """

    trainer: Trainer
    local: LocalTrainer
    step: LightningStep
    model: GlobalModel
    work: Sequence[ClientWork]
    alone: TrainAlone

    @property
    def num_steps(self) -> float:
        """Approximate number of local steps of the whole run; it is not smaller in a resumed run."""
        # a round is one step of the server
        limits = (self.trainer.max_epochs, self.trainer.max_steps)
        rounds = min((n for n in limits if n is not None and n >= 0), default=math.inf)
        if math.isinf(rounds):
            return rounds
        return rounds * sum(len(client.sizes) for client in self.work)

    def seconds_per_step(self, train: Callable[[], object], sample: Sequence[ClientWork]) -> float:
        """Return the shortest measured time per local step."""
        seconds = min(self._seconds(train) for _ in range(_TURNS))
        return seconds / sum(len(client.sizes) for client in sample)

    def _seconds(self, train: Callable[[], object]) -> float:
        is_cpu = self.trainer.strategy.root_device.type == "cpu"
        clock = time.thread_time if is_cpu else time.perf_counter
        began = clock()
        train()  # ends by reading a loss: nothing is left to wait for
        return max(clock() - began, 1e-9)

    def seconds_alone(self) -> float:
        """Return the seconds of a local step in sequential training."""
        sample = [client.head(10) for client in self.work[:: -(-len(self.work) // 4)]]
        mean = RunningMean(self.model.params)

        def train() -> None:
            for client in sample:
                update = self.alone(client, self.model).update
                mean.add(update.delta, client.num_examples)

        return self.seconds_per_step(train, sample)

    def seconds_in_slots(
        self, stacking: StackedOptions, sample: Sequence[ClientWork]
    ) -> tuple[SlotEngine, float]:
        """Return slots with given options, and the seconds of a client's local step in them."""
        engine = SlotEngine(self.trainer, self.local, stacking)

        def train() -> None:  # as a round does, with aggregation
            mean = RunningMean(self.model.params)
            for trained in engine.train(self.model, sample):
                usable, _ = usable_rows(trained)
                mean.add_rows(usable.deltas, usable.num_examples)

        train()  # compiles
        return engine, self.seconds_per_step(train, sample)

    def stackable(self, stacking: StackedOptions) -> tuple[Sequence[ClientWork], float]:
        """Return the work of clients that slots can train, and their fraction of all steps."""
        engine = SlotEngine(self.trainer, self.local, replace(stacking, num_slots=1))
        fitting = list(engine.split(GroupWork.of(self.work))[0])
        steps = [sum(len(client.sizes) for client in some) for some in (fitting, self.work)]
        return fitting, steps[0] / steps[1]

    def slots_for(self, work: Sequence[ClientWork], *, compiled: bool) -> int:
        """Return the number of slots: as many as fit memory and clients, or fewer if that takes no longer.

        Clients with equal numbers of steps end together: for 100 clients, 32 slots need four turns, as do 25.
        """
        size = self.local.space.num_entries
        most = min(fitting_slots(self.trainer, size, compiled=compiled), len(work))
        is_equal = len({len(client.sizes) for client in work}) == 1
        return math.ceil(len(work) / math.ceil(len(work) / most)) if is_equal else most

    def agreeing(self, stacking: StackedOptions) -> StackedOptions:
        """Return options under which slots give a client's sequential result.

        Args:
            stacking: the wanted options; padding and direct layers are dropped if results differ.

        Raises:
            CannotStack: with the operation that slots cannot run, or the value that differs.
        """
        size = self.trainer.datamodule.full_batch  # type: ignore[attr-defined]
        full = next((client for client in self.work if size in client.sizes), None)
        reason, whole_because = CannotStack(_NO_FULL_BATCH), ""
        has_direct = reason_against_direct_layers(self.trainer.lightning_module) is None
        ways = (True, False) if stacking.padded else (False,)
        for padded, direct in product(ways, (True, False) if has_direct else (False,)):
            if full is None and not padded:
                break
            sizes = sizes_to_try(self.work, size) if padded else _two(size)
            tried = replace(stacking, padded=padded, direct=direct)
            try:
                self._compare(tried, _of_sizes(full or self.work[0], sizes))
            except CannotStack as found:
                reason, whole_because = found, str(found) if padded else whole_because
            else:
                because = "" if padded else whole_because
                return replace(tried, whole_because=because)
        raise reason

    def _compare(self, stacking: StackedOptions, sample: ClientWork) -> None:
        """Train a client in slots and sequentially.

        Raises:
            CannotStack: if slots cannot train it, or a result differs.
        """
        metrics = metrics_of(self.trainer.lightning_module)
        before = MetricStates(metrics)
        try:
            expected = self.alone(sample, self.model)
            counted = [_numbers(metric) for metric in metrics]
            before.put_back()
            with warnings.catch_warnings():
                # operators that vmap runs client by client: slower than one client after the other
                warnings.filterwarnings("error", message="There is a performance drop")
                slots = SlotEngine(self.trainer, self.local, replace(stacking, num_slots=2))
                ((update,),) = slots.train(self.model, [sample])
            recounted = [_numbers(metric) for metric in metrics]
            own = slots.kept.get(sample.client_id, expected.own)
            found = TrainedClient(update, own, expected.own_start)
            self._refuse_other(expected, found, sample)
        except ClientFailure as failure:
            if not stacking.padded:
                raise
            text = str(failure).strip().splitlines()[0][:200]
            raise CannotPad(f"a batch of another size fails ({text})") from failure
        except (CannotStack, ConfigurationError):
            raise
        except Exception as error:
            raise cannot_run(error) from error
        finally:
            before.put_back()
        bound = max(_LEAST_SHARE, self._rounding.share)
        for metric, numbers, others in zip(metrics, counted, recounted, strict=True):
            is_same = numbers.shape == others.shape
            if not is_same or not (numbers - others).norm() <= bound * numbers.norm():
                name = f"{type(metric).__name__} object"
                raise CannotStack(f"a trial client's {name} was not the sequential one")

    def _refuse_other(
        self, expected: TrainedClient, found: TrainedClient, client: ClientWork
    ) -> None:
        apart = difference(
            expected, found, client, self.model, self.alone, self._rounding, math.inf
        )
        if apart is None:
            return
        reason = f"a trial client's {apart.name} was not the sequential one"
        if math.isinf(apart.explained):
            reason += ", and its training is too unstable to tell why"
        raise CannotStack(reason)

    @property
    def _rounding(self) -> Rounding:
        return Rounding.of(self.trainer.precision, self.trainer.lightning_module)

    def seconds_of_longest(self) -> float:
        """Return the seconds of a step of the client with most steps."""
        client = self._longest.head(1)
        self.alone(client, self.model)  # warms up
        return self._seconds(lambda: self.alone(client, self.model))

    @property
    def _longest(self) -> ClientWork:
        return max(self.work, key=lambda client: len(client.sizes))

    def speed_of(self, added: Speedup, seconds: float) -> float:
        """Return the speed of steps with one more speedup, relative to now; 0 if it fails or differs.

        Args:
            added: the speedup to add to those in use.
            seconds: approximate seconds of a step.
        """
        before, client = self.step.speedups, self._longest
        took: dict[tuple[Speedup, ...], list[float]] = {before: [], (*before, added): []}
        try:
            self.step.use((*before, added))
            found = self.alone(client.head(2), self.model)
            self.step.use(())
            self._refuse_other(self.alone(client.head(2), self.model), found, client.head(2))
            sample = client.head(max(1, math.ceil(SECONDS_OF_A_TURN / seconds)))
            for _ in range(_TURNS_OF_SPEEDUPS):
                for speedups, times in took.items():
                    self.step.use(speedups)
                    times.append(self._seconds(lambda: self.alone(sample, self.model)))
        except (ClientFailure, CannotStack):  # e.g. a view of images that wants the usual layout
            return 0.0
        finally:
            self.step.use(before)
        old, new = took.values()
        # the shortest of one of the two may be luck
        return min(
            median(one / other for one, other in zip(old, new, strict=True)), min(old) / min(new)
        )


def reason_against_speedup(step: LightningStep, speedup: Speedup) -> str | None:
    """Return why a speedup does not apply to the steps of a fit; None if it does."""
    module = step.trainer.lightning_module
    if not module.automatic_optimization:
        return extra_work(step.trainer)
    if not step.is_lean:
        return "accumulation, gradient scaling or hooks take part in its steps"
    return reason_against(speedup, module, step.trainer.optimizers[0])


def sample_of(work: Sequence[ClientWork], num_slots: int, num_steps: int) -> list[ClientWork]:
    """Return the first steps of clients, at least one client per slot, about ``num_steps`` in all.

    Example:
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


def sizes_to_try(work: Sequence[ClientWork], full: int) -> list[int]:
    """Return the batch sizes of a trial of padding.

    Example:
        >>> work = [ClientWork(0, 17, torch.arange(17), [8, 8, 1]), ClientWork(1, 5, torch.arange(5), [5])]
        >>> sizes_to_try(work, 8)
        [8, 4, 1, 2, 5]
    """
    others = sorted({size for client in work for size in client.sizes})
    some = others[:: max(1, len(others) // _MOST_SIZES)]
    return list(dict.fromkeys([full, (full + 1) // 2, 1, min(2, full), *some]))


def _two(full: int) -> list[int]:
    """Return the sizes of two batches; batch norm fails on a batch of one example."""
    return [full, full // 2] if full >= 4 else [full]


def _of_sizes(client: ClientWork, sizes: list[int]) -> ClientWork:
    """Return a client's work on batches of given sizes, which may share examples."""
    order = torch.cat([client.order[torch.arange(size) % len(client.order)] for size in sizes])
    return client._replace(order=order, sizes=sizes)


def _numbers(metric: Metric) -> Tensor:
    """Return all states of a metric as one vector."""
    states = [s for v in metric.metric_state.values() for s in (v if isinstance(v, list) else [v])]
    return torch.cat([torch.zeros(0), *(s.detach().float().cpu().flatten() for s in states)])
