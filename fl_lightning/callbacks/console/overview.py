"""What is about to be trained, in a few lines before the first round."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.callbacks.console.round_line import federation_of
from fl_lightning.callbacks.console.run_log import folder_of
from fl_lightning.callbacks.evaluated_model import saved_after, shown_path
from fl_lightning.federation.federation import Federation


class RunOverview(Callback):
    """Says what a fit's model, its federation and its machine are, and where it is written.

    Beside what others say of themselves: the data (`PartitionReport`), the cost, the engine.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it once, before the first round."""
        folder = folder_of(trainer)  # which processes agree on: all must ask
        if not trainer.is_global_zero:
            return
        rank_zero_info(f"model: {', '.join(_model(pl_module))}")
        for optimizer in trainer.optimizers:
            rank_zero_info(f"optimizer: {', '.join(_optimizer(optimizer))}")
        if (federation := federation_of(trainer)) is not None:
            rank_zero_info(f"federation: {'; '.join(_federation(trainer, federation))}")
        rank_zero_info(f"machine: {', '.join(_machine(trainer))}")
        if folder is not None:
            rank_zero_info(f"run: {', '.join([shown_path(folder), *_resumed(trainer)])}")


def _resumed(trainer: Trainer) -> Iterator[str]:
    if trainer.ckpt_path:
        path = str(trainer.ckpt_path)
        yield " ".join(["resumed from", shown_path(path), *filter(None, [saved_after(path)])])


def _model(module: LightningModule) -> Iterator[str]:
    network = getattr(module, "network", None) or getattr(module, "model", None)
    inner = f" ({type(network).__name__})" if isinstance(network, torch.nn.Module) else ""
    yield f"{type(module).__name__}{inner}"
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    yield f"{_short(sum(size for size, _ in sizes))} parameters"
    if frozen := sum(size for size, trains in sizes if not trains):
        yield f"{_short(frozen)} of them frozen"


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield its class and what is not that class's default: options of several layers of YAML mix."""
    yield type(optimizer).__name__
    known = inspect.signature(type(optimizer)).parameters
    for name in (name for name in optimizer.defaults if name in known):
        own = f"initial_{name}"  # what a schedule has changed already
        values = dict.fromkeys(str(g.get(own, g.get(name))) for g in optimizer.param_groups)
        if name == "lr" or list(values) != [str(known[name].default)]:
            yield f"{name} {' or '.join(values)}"


def _federation(trainer: Trainer, federation: Federation) -> Iterator[str]:
    assert federation.rounds is not None
    groups = federation.rounds.run.groups
    epochs, steps = federation.local_epochs, federation.local_steps
    work = f"{epochs} local epochs" if epochs else f"{steps} local steps"
    work = work.removesuffix("s") if 1 in (epochs or steps, 0) else work
    rounds = trainer.max_epochs or -1
    planned = f", {rounds} round{'s' * (rounds > 1)}" if rounds > 0 else ""
    yield f"{groups.num_clients:,} of {groups.population.num_clients:,} clients a round, {work}{planned}"
    parts = (
        *(federation.correction, federation.personal, federation.asynchronous),
        *(federation.aggregator, *federation.updates, *federation.download),
        *(federation.privacy, federation.devices, federation.attackers),
    )
    named = [type(part).__name__ for part in parts if part is not None]
    if named:
        yield ", ".join(named)


def _machine(trainer: Trainer) -> Iterator[str]:
    device, count = trainer.strategy.root_device, trainer.world_size
    yield "CPU" if device.type == "cpu" else str(device)
    threads = torch.get_num_threads()
    of_threads = f" of {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    yield f"{count} process{'es' * (count > 1)}{of_threads}"
    if trainer.precision != "32-true":
        yield str(trainer.precision)


def _short(count: int) -> str:
    """Return a number in three digits.

    Example:
        >>> _short(152_074), _short(21_700_000), _short(67)
        ('152 k', '21.7 M', '67')
    """
    for size, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)
