"""Trials before a run: clients train with several engines, to compare results and times.

An engine passes if a client's update, buffers, personal tensors, logged values (see `difference`) and
torchmetrics objects differ by rounding only; with padding, on batches of several sizes.

Ways to train are timed in turns, and the shortest turn of each way counts. On a CPU the time is that of this
thread (`time.thread_time`), which other processes affect only through cache and memory bus; on a GPU it is
wall time. `EngineChooser` decides by these times.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import CannotPad, CannotStack, Speedup, StackedOptions, usable_rows
from fl_lightning.federation.clients.in_slots import SlotEngine, cannot_run
from fl_lightning.federation.clients.spot_check import (
    Rounding,
    TrainAlone,
    TrainedClient,
    difference,
)
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.kernels import reason_against_direct_layers

# Turns of a measurement, of which the first warms up. Speedups differ by a few per cent only.
_TURNS, _TURNS_OF_SPEEDUPS = 4, 7
# Approximate seconds for which one client's steps are timed in a turn of a speedup.
SECONDS_OF_A_TURN = 0.1
# Largest relative difference between the states of a torchmetrics object that passes, in full precision.
_LEAST_SHARE = 1e-3
# Approximate number of batch sizes in a trial of padding, besides the four that are always tried.
_MOST_SIZES = 4
_NO_FULL_BATCH = (
    "no client has a full batch (federation.pad_batches pads smaller ones, for a loss that is a mean over "
    "examples)"
)


class Way(NamedTuple):
    """A way to train clients: an engine or speedups, and the clients whose training is timed.

    Attributes:
        sample: the clients' work.
        slots: the engine that trains them together; None for sequential training.
        speedups: speedups of sequential steps.
    """

    sample: Sequence[ClientWork]
    slots: SlotEngine | None = None
    speedups: tuple[Speedup, ...] = ()


@dataclass(frozen=True)
class Trial:
    """Trains clients with several engines before a run, to compare results and times; discards the results.

    Args:
        trainer: a Trainer, set up for fitting.
        local: the sequential engine.
        step: the local step of the sequential engine.
        model: the global model.
        work: the work of clients, with at least a batch each.
        alone: trains a client from a model sequentially, changing nothing but the module and its metrics.
    """

    trainer: Trainer
    local: LocalTrainer
    step: LightningStep
    model: GlobalModel
    work: Sequence[ClientWork]
    alone: TrainAlone

    @property
    def num_steps(self) -> float:
        """Approximate number of local steps of all clients in the whole run, finished rounds included."""
        # a round is one step of the server
        limits = (self.trainer.max_epochs, self.trainer.max_steps)
        rounds = min((n for n in limits if n is not None and n >= 0), default=math.inf)
        if math.isinf(rounds):
            return rounds
        return rounds * sum(len(client.sizes) for client in self.work)

    def seconds(self, *ways: Way, turns: int = _TURNS) -> list[float]:
        """Return the shortest measured seconds per local step of each way to train; the ways take turns."""
        is_cpu = self.trainer.strategy.root_device.type == "cpu"
        clock = time.thread_time if is_cpu else time.perf_counter
        shortest = [math.inf] * len(ways)
        for number, way in [*enumerate(ways)] * turns:
            if way.slots is None and way.speedups != self.step.speedups:
                self.step.use(way.speedups)
            began = clock()
            self._train(way)  # ends by reading a loss: nothing is left to wait for
            seconds = max(clock() - began, 1e-9) / sum(len(client.sizes) for client in way.sample)
            shortest[number] = min(seconds, shortest[number])
        return shortest

    def _train(self, way: Way) -> None:
        if way.slots is None:
            for client in way.sample:
                self.alone(client, self.model)
        else:
            for updates in way.slots.train(self.model, way.sample):
                usable_rows(updates)

    @property
    def longest(self) -> ClientWork:
        """Work of the client with the most local steps."""
        return max(self.work, key=lambda client: len(client.sizes))

    def speed_of(self, added: Speedup, seconds: float) -> float:
        """Return how many times as fast local steps are with one more speedup; 0 if they fail or differ in result.

        Args:
            added: the speedup to add to those in use.
            seconds: approximate seconds of a step.
        """
        before, few = self.step.speedups, self.longest.head(2)
        sample = [self.longest.head(max(1, math.ceil(SECONDS_OF_A_TURN / seconds)))]
        ways = [Way(sample, speedups=some) for some in (before, (*before, added))]
        try:
            self.step.use((*before, added))
            found = self.alone(few, self.model)
            self.step.use(())
            self._refuse_other(self.alone(few, self.model), found, few)
            old, new = self.seconds(*ways, turns=_TURNS_OF_SPEEDUPS)
        except (ClientFailure, CannotStack):  # e.g. a view of images that wants the usual layout
            return 0.0
        finally:
            self.step.use(before)
        return old / new

    def agreeing(self, stacking: StackedOptions) -> StackedOptions:
        """Return slot options under which a client's result equals that of sequential training.

        Args:
            stacking: the desired options; padding and direct layers are dropped if results differ.

        Raises:
            CannotStack: naming the operation that slots cannot run, or the value that differs.
        """
        size = self.trainer.datamodule.full_batch  # type: ignore[attr-defined]
        full = next((client for client in self.work if size in client.sizes), None)
        reason, whole_because = CannotStack(_NO_FULL_BATCH), ""
        has_direct = reason_against_direct_layers(self.trainer.lightning_module) is None
        ways = (True, False) if stacking.padded else (False,)
        for padded, direct in product(ways, (True, False) if has_direct else (False,)):
            if full is None and not padded:
                break
            tried = replace(stacking, padded=padded, direct=direct, num_slots=2)
            sizes = sizes_to_try(self.work if padded else (), size)
            try:
                self._compare(tried, _of_sizes(full or self.work[0], sizes))
            except CannotStack as found:
                reason, whole_because = found, str(found) if padded else whole_because
            else:
                return replace(tried, whole_because="" if padded else whole_because)
        raise reason

    def _compare(self, stacking: StackedOptions, sample: ClientWork) -> None:
        """Train a client in slots and sequentially, and raise if the results differ.

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
                slots = SlotEngine(self.trainer, self.local, stacking)
                ((update,),) = slots.train(self.model, [sample])
            recounted = [_numbers(metric) for metric in metrics]
            own = slots.kept.get(sample.client_id, expected.own)
            self._refuse_other(expected, TrainedClient(update, own, expected.own_start), sample)
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
        for metric, numbers, others in zip(metrics, counted, recounted, strict=True):
            self._refuse_other_metric(metric, numbers, others)

    def _refuse_other(
        self, expected: TrainedClient, found: TrainedClient, client: ClientWork
    ) -> None:
        apart = difference(
            expected, found, client, self.model, self.alone, self._rounding, math.inf
        )
        if apart is None:
            return
        reason = f"a trial client's {apart.name} differs from sequential training"
        if math.isinf(apart.explained):
            reason += ", and its training is too unstable to tell why"
        raise CannotStack(reason)

    def _refuse_other_metric(self, metric: Metric, expected: Tensor, found: Tensor) -> None:
        bound = max(_LEAST_SHARE, self._rounding.share) * expected.norm()
        if expected.shape != found.shape or not (expected - found).norm() <= bound:
            name = f"{type(metric).__name__} object"
            raise CannotStack(f"a trial client's {name} differs from sequential training")

    @property
    def _rounding(self) -> Rounding:
        return Rounding.of(self.trainer.precision, self.trainer.lightning_module)


def sizes_to_try(work: Sequence[ClientWork], full: int) -> list[int]:
    """Return the batch sizes to try: with padding small and large ones, without padding one or two large ones.

    Args:
        work: the work of the clients whose batches are padded; empty without padding.
        full: size of a full batch.

    Example:
        >>> work = [ClientWork(0, 17, torch.arange(17), [8, 8, 1]), ClientWork(1, 5, torch.arange(5), [5])]
        >>> sizes_to_try(work, 8), sizes_to_try([], 8)
        ([8, 4, 1, 2, 5], [8, 4])
    """
    if not work:  # batch norm fails on a batch of one example
        return [full, full // 2] if full >= 4 else [full]
    others = sorted({size for client in work for size in client.sizes})
    some = others[:: max(1, len(others) // _MOST_SIZES)]
    return list(dict.fromkeys([full, (full + 1) // 2, 1, min(2, full), *some]))


def _of_sizes(client: ClientWork, sizes: list[int]) -> ClientWork:
    """Return a client's work with batches of given sizes, which may share examples, for a trial."""
    order = torch.cat([client.order[torch.arange(size) % len(client.order)] for size in sizes])
    return client._replace(order=order, sizes=sizes)


def _numbers(metric: Metric) -> Tensor:
    """Return all states of a torchmetrics object as one vector."""
    states = [s for v in metric.metric_state.values() for s in (v if isinstance(v, list) else [v])]
    return torch.cat([torch.zeros(0), *(s.detach().float().cpu().flatten() for s in states)])
