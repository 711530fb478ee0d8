"""State of a run in a checkpoint: everything except the module's weights, which Lightning saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checkpoints.files import AtomicCheckpointIO, load_memory
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.loop import is_in_round
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import check_same, kind_of

# Features that both runs must have, or both lack: name in errors, by key of the stage.
_CHOICES = {"versions": "choice of federation.asynchronous", "privacy": "privacy"}
# Features whose class must be the same in both runs: name in errors, by key of the stage.
_KINDS = {"correction": "correction", "personal": "choice of federation.personal"}


class MissedPlateaus:
    """Takes the steps of `ReduceLROnPlateau` that Lightning leaves out when a run resumes.

    Lightning steps these schedules after the callbacks that save a checkpoint at an epoch's end. It saves no
    metrics, so that after resuming it ends this epoch or the next one without the step. If the checkpoint was
    saved between a round's training and its validation, which Lightning then leaves out, the step uses the value
    of the validation before.

    Args:
        epoch: the epoch that was open when the checkpoint was saved; None without one.
        positions: number of steps that each schedule had taken by then.
    """

    def __init__(self, epoch: int | None, positions: Sequence[int]) -> None:
        self._epoch, self._positions, self._num_left = epoch, positions, 2

    def catch_up(self, trainer: Trainer) -> None:
        """At an epoch's start, step ReduceLROnPlateau schedules that Lightning left out at the last epoch's end."""
        if self._epoch is None or trainer.current_epoch <= self._epoch or not self._num_left:
            return
        for config, position in zip(plateaus(trainer), self._positions, strict=False):
            is_due = trainer.current_epoch % config.frequency == 0
            value = trainer.callback_metrics.get(config.monitor or "")
            if is_due and config.scheduler.last_epoch == position and value is not None:
                trainer.lightning_module.lr_scheduler_step(config.scheduler, value)
        self._epoch, self._num_left = trainer.current_epoch, self._num_left - 1
        self._positions = [config.scheduler.last_epoch for config in plateaus(trainer)]


def plateaus(trainer: Trainer) -> list[LRSchedulerConfig]:
    """Return the learning-rate schedules that step on a monitored metric once per epoch."""
    if not trainer.lightning_module.automatic_optimization:  # such a module steps them itself
        return []
    return [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]


def run_state(rounds: FitRounds) -> dict[str, Any]:
    """Return a federated run's state for a checkpoint: server, stages, engine, client states and metrics.

    Updates of an open round are left out: a resumed run trains that round again from its start. Only one
    of several processes writes the checkpoint, and sums of an open round have no noise and need keys.
    """
    run, server, stages = rounds.run, rounds.server, rounds.stages
    record, trainer = rounds.record, run.trainer
    monitored = {config.monitor for config in plateaus(trainer)}
    if stages.is_private:
        begun = RoundRecord(began_at=record.began_at)
        record = begun if server.is_open else record.without_clients()
    beside = isinstance(run.trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    state = {
        "space": run.local.space.fingerprint(),
        "mask": run.local.space.mask_fingerprint(),
        "seed": rounds.options.seed,
        "server": server.state_dict(),
        "record": record.state_dict(),
        "prog_bar": sorted(run.collector.prog_bar),
        "metrics": list(run.collector.metric_states(run.module).states),
        "inside": server.is_open,
        "engine": rounds.clients.engine.state_dict(),
        "client_state": run.local.state_names,
        "memory": {} if run.ranks.rank else run.memory.state_dict(inside=not beside),
        "population": run.cohorts.population.state_dict(),
        "stages": {stage.key: stage.state_dict() for stage in stages if stage.key is not None},
        "open_epoch": trainer.current_epoch if is_in_round(trainer) else None,
        "plateaus": [config.scheduler.last_epoch for config in plateaus(trainer)],
        "monitored": {n: float(v) for n, v in trainer.callback_metrics.items() if n in monitored},
    }
    if not rounds.is_kept_by_lightning:
        state["model"] = vars(server.model)
    return state


def load_run_state(rounds: FitRounds, state: dict[str, Any]) -> MissedPlateaus:
    """Restore a run from a checkpoint that was saved between two rounds or during a round.

    Raises:
        ConfigurationError: if the checkpoint is of another model, seed or configuration, or of a version of
            this package that keeps other entries.
    """
    try:
        return _load(rounds, state)
    except KeyError as error:
        raise ConfigurationError(
            f"the checkpoint has no entry {error}: it was written by another version of fl_lightning. Resume "
            "with that version, or start without ckpt_path"
        ) from error


def _load(rounds: FitRounds, state: dict[str, Any]) -> MissedPlateaus:
    _check(rounds, state)
    run, server = rounds.run, rounds.server
    rounds.follow_state()
    if "model" in state:
        server.replace_model(GlobalModel(**state["model"]))
        run.local.restore(server.model)
    if rounds.clients.add_named_state():
        rounds.follow_state()
    server.load_state_dict(state["server"])
    for stage in rounds.stages:
        if stage.key is not None:
            stage.load_state_dict(state["stages"].get(stage.key), server.model)
    rounds.record.load_state_dict(state["record"])
    run.collector.prog_bar |= set(state["prog_bar"])
    for place in state["metrics"] if state["inside"] else ():
        for metric in metrics_of(run.module.get_submodule(place)):
            metric.reset()  # saved states hold clients that will train again
    rounds.clients.engine.load_state_dict(state["engine"])
    load_memory(run.memory, state.get("memory", {}), run.trainer.ckpt_path, adopt=True)
    run.cohorts.population.load_state_dict(state["population"])
    numbers = {n: torch.tensor(v, dtype=torch.float64) for n, v in state["monitored"].items()}
    run.trainer.callback_metrics.update(numbers)
    return MissedPlateaus(state["open_epoch"], state["plateaus"])


def _check(rounds: FitRounds, state: dict[str, Any]) -> None:
    """Raise if a checkpoint is of a run with another model, seed or feature; load only names of tensors."""
    run, saved = rounds.run, state["stages"]
    keys = {stage.key for stage in rounds.stages}
    for key, what in _CHOICES.items():
        check_same(what, saved.get(key) is not None, key in keys)
    for stage in rounds.stages:
        if stage.key is not None:
            stage.check(saved.get(stage.key))
    for key, what in _KINDS.items():
        if key not in keys:
            check_same(what, kind_of(saved.get(key) or {}), None)
    check_same("model", state["space"], run.local.space.fingerprint())
    check_same("mask", state["mask"], run.local.space.mask_fingerprint())
    names = state["client_state"]
    if names is not None:
        run.local.set_state(names)
    check_same("seed", state["seed"], rounds.options.seed)
