"""Channels of a supernet sorted before narrower sub-networks join its training.

Once-for-All does so at the start of a phase in which a width joins: narrow networks then begin with
the channels that count most. The largest network, and those of widths that train already, compute the
same before and after. Who remembers channels by their number begins anew, as the published phases do:
the optimizer of a central run, the server's of a federation. What clients remember is refused.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic width".
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.federation import Federation
from fl_lightning.nas.elastic.shrinking import ProgressiveShrinking
from fl_lightning.nas.elastic.sorting import sort_channels
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.methods import Shrinking

_NO_WIDTH = ("kernel", "depth")
# of a federation, that remember coordinates from round to round
_MEMORIES = ("correction", "personal", "updates", "asynchronous", "client_state", "privacy")


def check_sorting(trainer: Trainer, method: Any) -> None:
    """Refuse to sort where something of the run would go on with channels in their old places.

    Raises:
        ConfigurationError: naming it.
    """
    federation = _federation(trainer)
    if not (isinstance(method, Shrinking) and method.sort) or federation is None:
        return
    found = [name for name in _MEMORIES if getattr(federation, name, None)]
    if found:
        raise ConfigurationError(
            f"model.method.sort gives channels new places between rounds, and federation.{found[0]} "
            "remembers the old ones: leave one of them out"
        )
    if str(trainer.precision) in ("bf16-true", "64-true"):
        raise ConfigurationError(
            f"model.method.sort: with precision {trainer.precision} the server keeps weights of its own, "
            "which cannot be sorted between rounds: use 32-true or bf16-mixed"
        )


def sort_before_round(trainer: Trainer, module: Any) -> bool:
    """Sort the channels if a narrower width joins in the round that begins; return whether they were."""
    method, round_ = module.method, trainer.current_epoch
    if not (isinstance(method, Shrinking) and method.sort) or round_ == 0:
        return False
    schedule = method.schedule(module.space, max(0, trainer.max_epochs or 0))
    if not _width_joins(schedule, round_):
        return False
    shape = {"num_classes": module.costs.num_classes, "in_channels": module.costs.in_channels}
    with torch.device("meta"):
        trained = [module.space.build(one, **shape) for one in _trained(schedule, round_ - 1)]
    sort_channels(module.network, trained)
    _begin_anew(trainer)
    return True


def _begin_anew(trainer: Trainer) -> None:
    """Have the optimizer that lasts from round to round forget."""
    federation = _federation(trainer)
    if federation is None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        return
    assert federation.rounds is not None, "the fit has begun"
    server = federation.rounds.server.optimizer
    fresh = federation.server_optimizer([p for g in server.param_groups for p in g["params"]])
    server.state.clear()
    server.state.update(fresh.state)  # some have their first one from the start


def _width_joins(schedule: ProgressiveShrinking, round_: int) -> bool:
    now, before = schedule.kept(round_), schedule.kept(round_ - 1)
    rows = zip(schedule.space.named_sizes, now, before, strict=True)
    return any(size.name not in _NO_WIDTH and more > less for (_, size), more, less in rows)


def _trained(schedule: ProgressiveShrinking, round_: int) -> list[Architecture]:
    """Return networks of all narrower widths that train in a round, as deep as there are."""
    space: SizeSpace = schedule.space
    kept = schedule.kept(round_)
    narrower = range(1, max(kept))
    found = []
    for steps in narrower:
        choices = [
            len(size.options) - 1 - (0 if size.name in _NO_WIDTH else min(steps, number - 1))
            for (_, size), number in zip(space.named_sizes, kept, strict=True)
        ]
        found.append(space.architecture(choices))
    return [one for one in found if one != space.largest]


def _federation(trainer: Trainer) -> Federation | None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Federation)), None)
