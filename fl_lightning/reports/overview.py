"""Callbacks that log a run's model, optimizer, federation, machine and partition before the first round."""

from __future__ import annotations

import inspect
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Federation, limited, num_batches, run_folder
from fl_lightning.reports.evaluated_model import saved_after, shown_path
from fl_lightning.reports.layout import duration
from fl_lightning.reports.log_file import detail, folder_of, software
from fl_lightning.reports.loggers import log_figure
from fl_lightning.reports.progress import federation_of, unit
from fl_lightning.reports.run_charts import in_bytes, partition_figure
from fl_lightning.server.robust.rule import RobustRule
from fl_lightning.server.server import as_aggregator

_DRY_ROUNDS = 2
_DRY_CLIENTS = 20  # most clients that a dry run trains in a round and process


class RunOverview(Callback):
    """Logs an overview when a fit starts: one line each for model, optimizer, federation, machine and folder.

    `PartitionReport` logs the data; the federation logs its bytes and its engine.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the overview, before the first round."""
        folder = folder_of(trainer)  # a collective call: every process has to make it
        if not trainer.is_global_zero:
            return
        for name, fact in facts_of(trainer, pl_module):
            rank_zero_info(f"{name}: {fact}")
        is_dry = any(isinstance(each, DryRun) for each in trainer.callbacks)  # type: ignore[attr-defined]
        if folder is not None and not is_dry:  # the folder of a dry run is removed
            path = str(trainer.ckpt_path or "")
            resumed = f", resumed from {shown_path(path)} {saved_after(path)}".rstrip()
            rank_zero_info(f"run: {shown_path(folder)}{resumed if path else ''}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If early stopping has ended the fit, log its reason."""
        if (reason := why_it_stopped(trainer)) is not None:
            rank_zero_info(f"stopped: {reason}")


def facts_of(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, str]]:
    """Yield the overview of a fit as pairs (name, text): model, optimizers, federation, machine."""
    yield "model", ", ".join(_model(module))
    for optimizer in trainer.optimizers:
        yield "optimizer", ", ".join(_optimizer(optimizer))
    if (federation := federation_of(trainer)) is not None:
        yield "federation", "; ".join(_federation(trainer, federation))
    yield "machine", ", ".join(_machine(trainer))


def why_it_stopped(trainer: Trainer) -> str | None:
    """Return in words why early stopping ended a fit, or None if it did not."""
    stopping = [c for c in trainer.early_stopping_callbacks if isinstance(c, EarlyStopping)]
    ended = next((c for c in stopping if c.stopped_epoch), None)
    # a resumed run knows the stop of the run before
    if ended is None or not trainer.should_stop:
        return None
    best, name = float(ended.best_score), ended.monitor
    now = float(trainer.callback_metrics.get(name, math.nan))
    if ended.wait_count >= ended.patience:
        least = f" by more than {abs(ended.min_delta):g}" if ended.min_delta else ""
        why = f"{name} has not improved{least} in {ended.wait_count} validations; its best is {best:.4g}"
    elif not math.isfinite(now):
        why = f"{name} is {now}; its best was {best:.4g}"
    else:
        end = (
            ended.divergence_threshold
            if ended.stopping_threshold is None
            else ended.stopping_threshold
        )
        why = f"{name} is {now:.4g}, beyond the threshold {end}"
    return f"after {unit(trainer)} {ended.stopped_epoch + 1} of {trainer.max_epochs}, because {why}"


def provenance(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Return facts about a fit by name, such as its date, data, model, seed, package versions and git commit."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    source = getattr(data, "source", data)
    clients = f", {len(data.clients):,} clients" if isinstance(data, FederatedDataModule) else ""
    federation = federation_of(trainer)
    seed = os.environ.get("PL_GLOBAL_SEED") if federation is None else federation.seed
    facts = dict(facts_of(trainer, module))
    known = {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "data": "" if source is None else f"{type(source).__name__}{clients}",
        "model": facts["model"],
        "algorithm": "" if federation is None else _algorithm(federation),
        **facts,
        "seed": "" if seed is None else str(seed),
        "versions": software(),
        "commit": _commit(),
        "command": " ".join(sys.argv),
    }
    known["machine"] += f"; {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {name: value for name, value in known.items() if value}


def _commit() -> str:
    """Return the git commit of the working directory; empty outside of a git repository."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5)
        return run.stdout.strip()

    try:
        return git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=, and changes")
    except (OSError, subprocess.SubprocessError):
        return ""


def _model(module: LightningModule) -> Iterator[str]:
    network = getattr(module, "network", None) or getattr(module, "model", None)
    inner = f" ({type(network).__name__})" if isinstance(network, torch.nn.Module) else ""
    yield f"{type(module).__name__}{inner}"
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    yield f"{sum(size for size, _ in sizes):,} parameters"
    if frozen := sum(size for size, trains in sizes if not trains):
        yield f"{frozen:,} of them frozen"


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield in words an optimizer's class, its learning rate, and its options that are not defaults."""
    yield type(optimizer).__name__
    known = inspect.signature(type(optimizer)).parameters
    for name in (name for name in optimizer.defaults if name in known):
        own = f"initial_{name}"  # the value before a schedule changed it
        values = dict.fromkeys(str(g.get(own, g.get(name))) for g in optimizer.param_groups)
        if name == "lr" or list(values) != [str(known[name].default)]:
            yield f"{name} {' or '.join(values)}"


def _federation(trainer: Trainer, federation: Federation) -> Iterator[str]:
    assert federation.rounds is not None
    cohorts = federation.rounds.run.cohorts
    epochs, steps = federation.local_epochs, federation.local_steps
    work = f"{epochs} local epochs" if epochs else f"{steps} local steps"
    work = work.removesuffix("s") if 1 in (epochs or steps, 0) else work
    rounds = trainer.max_epochs or -1
    planned = f", {rounds} round{'s' * (rounds > 1)}" if rounds > 0 else ""
    yield f"{cohorts.num_clients:,} of {cohorts.population.num_clients:,} clients a round, {work}{planned}"
    if named := _parts(federation):
        yield ", ".join(named)


def _parts(federation: Federation) -> list[str]:
    """Return class names of a federation's components, such as its aggregator, privacy and attackers."""
    parts = (
        *(federation.correction, federation.personal, federation.asynchronous),
        *(federation.aggregator, *federation.updates, *federation.download),
        *(federation.privacy, federation.devices, federation.attackers),
    )
    return [type(part).__name__ for part in parts if part is not None]


def _algorithm(federation: Federation) -> str:
    """Name a federation's algorithm: its components other than plain averaging, or ``FedAvg`` without any."""
    return ", ".join(name for name in _parts(federation) if name != "Mean") or "FedAvg"


def _machine(trainer: Trainer) -> Iterator[str]:
    device, count = trainer.strategy.root_device, trainer.world_size
    yield "CPU" if device.type == "cpu" else str(device)
    threads = torch.get_num_threads()
    of_threads = f" of {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    yield f"{count} process{'es' * (count > 1)}{of_threads}"
    if trainer.precision != "32-true":
        yield str(trainer.precision)


class DryRun(Callback):
    """Stops a fit after two rounds, and logs estimates for the whole run: seconds, memory, bytes sent.

        seconds = a + s (C / K - 1) + (R - 1) s C / K + R v / e

    R: rounds; C: clients of a round, of which the dry run trains K; a: time of the start and the first round,
    s: of the second round, both without validation; v: of a validation, which runs in every e-th round. On a
    CPU, only CPU time of this process counts. Put this callback first, so that the work of other callbacks at
    the end of the fit does not count as part of the last round.

    Args:
        options: options of the Trainer, modified in place: K clients in a round, and a validation in every
            round. K is at most 20 per process, or C if the algorithm depends on the number of clients, as
            with privacy and robust rules.
        federation: the federation; None for central training.
        data: the data module.

    Attributes:
        seconds: estimated seconds of the whole fit; inf if it has no end.
    """

    def __init__(self, options: Any, federation: Federation | None, data: Any) -> None:
        super().__init__()
        self.seconds = math.nan
        self._every: float = options["check_val_every_n_epoch"] or 1
        if options["check_val_every_n_epoch"] is not None:
            options["check_val_every_n_epoch"] = 1
        options["min_epochs"] = options["min_steps"] = None
        self._share, self._marks = 1.0, list[float]()
        self._validation = self._paused = 0.0
        count = getattr(data, "num_clients", None)
        if federation is None or count is None or _needs_whole_cohort(federation):
            return
        limit = options["limit_train_batches"]
        cohort = limited(federation.cohort.expected_size(count), 1.0 if limit is None else limit)
        devices = options["devices"] if isinstance(options["devices"], int) else 1
        if cohort > (most := _DRY_CLIENTS * devices):
            options["limit_train_batches"] = most
            self._share = cohort / most

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock that measures the two rounds."""
        is_cpu = trainer.strategy.root_device.type == "cpu"
        self._clock = time.thread_time if is_cpu else time.perf_counter
        self._mark()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the fit validate after both of its rounds, also if ``val_check_interval`` spans several rounds."""
        batches = num_batches(trainer)
        interval = getattr(trainer, "val_check_interval", 1.0)  # missing if it is a time
        is_count = isinstance(interval, int) and isinstance(batches, int)
        if trainer.check_val_every_n_epoch is None and is_count:
            self._every = interval / batches
            trainer.val_check_batch = batches

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time at which a round starts; the previous round's time includes its checkpoint."""
        self._mark()
        self._validation = 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the fit after its second round."""
        if len(self._marks) > _DRY_ROUNDS:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, since a validation begins, whose time is counted separately."""
        self._began = self._clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the clock, and count the seconds of the validation separately."""
        seconds = self._clock() - self._began
        self._validation += seconds
        self._paused += seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the estimates for the whole run."""
        self._mark()
        for line in self._lines(trainer) if trainer.is_global_zero else ():
            rank_zero_info(f"estimate: {line}")

    def _mark(self) -> None:
        self._marks.append(self._clock() - self._paused)

    def _lines(self, trainer: Trainer) -> Iterator[str]:
        began, *starts, end = self._marks
        last = end - starts[-1]
        a_round = last * self._share + self._validation / self._every
        steps = trainer.global_step / len(starts)  # 1 in a federation
        limits = ((trainer.max_epochs, 1), (trainer.max_steps, steps))
        ends = [math.ceil(n / per) for n, per in limits if n is not None and n >= 0 and per]
        rounds, name = min(ends, default=None), unit(trainer)
        if rounds is None:
            self.seconds = math.inf
            yield f"{a_round:.3g} s for each {name}, whose number has no limit"
        else:
            first = (starts[1] if len(starts) > 1 else end) - began
            self.seconds = first - last + rounds * a_round
            yield f"{duration(self.seconds)} for {rounds} {name}s, {a_round:.3g} s for each"
        if (peak := _peak_memory()) is not None:
            yield f"{in_bytes(peak)} of memory in each process"
        for way, words in (("up", "from clients"), ("down", "to clients")):
            sent = trainer.callback_metrics.get(f"round/total_bytes_{way}")
            if sent is not None:
                total = in_bytes(float(sent) * self._share * (rounds or 1))
                yield f"{total} {words}" + f" in each {name}" * (rounds is None)


def _needs_whole_cohort(federation: Federation) -> bool:
    """Return whether a dry run needs whole cohorts: for privacy, robust or secure sums, or ``min_replies``."""
    aggregator = as_aggregator(federation.aggregator)
    return (
        federation.client_privacy is not None  # needs a random sample
        or federation.min_replies > 1
        or isinstance(aggregator, RobustRule)  # compares clients with one another
        or aggregator.protection is not None
    )


def _peak_memory() -> int | None:
    """Return the peak memory of this process in bytes; None on Windows, where it is unknown."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB


class PartitionReport(Callback):
    """Reports which client has which data when a fit starts: logs a summary and a figure, saves a CSV file.

    The picture ``partition`` (clients × classes) goes to loggers that accept pictures, otherwise into a
    file. ``partition.csv`` in the run's folder has one row per client.
    """

    # data that this callback reveals in a private run, named in a warning
    unprotected = "the picture and table of the partition"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and save the partition of the data over clients, before the first round."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            return
        folder = run_folder(trainer)  # a collective call: every process has to make it
        if not trainer.is_global_zero:
            return
        summary = data.summary()
        rank_zero_info(f"data: {type(data.source).__name__}, {summary.as_line()}")
        rank_zero_info(summary.as_text(), **detail())
        if trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        summary.save(Path(folder) / "partition.csv")
        log_figure(trainer, "partition", lambda: partition_figure(summary.table()), step=0)
