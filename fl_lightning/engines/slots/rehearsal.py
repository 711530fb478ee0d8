"""What a training step will do in slots, found out by running it on one batch beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from fl_lightning.engines.functional.functional_step import (
    Observed,
    TrainingStep,
    copies_of,
    map_tensors,
    tensors_in,
)
from fl_lightning.engines.functional.metric_feed import MetricFeed
from fl_lightning.engines.slots.drawn_rows import DrawnRows


@dataclass(frozen=True)
class Rehearsal:
    """What was found.

    Attributes:
        draws: the step's random numbers.
        feed: the metrics that it updates.
        metrics: those that it logs, by name.
        is_final: whether later rounds will find the same: the step is arithmetic only, and calls no
            dropout that may be switched on.
    """

    draws: DrawnRows
    feed: MetricFeed
    metrics: dict[str, Metric]
    is_final: bool


def rehearse(
    step: TrainingStep, module: nn.Module, batch: Any, *, num_slots: int, by_example: bool
) -> Rehearsal:
    """Run the step on a full batch, and on one example of it; only what it draws is a consequence.

    Args:
        step: of the module.
        module: it is left alone.
        batch: a full one.
        num_slots: G.
        by_example: whether the stacked step evaluates its loss example by example, to pad batches.

    Raises:
        CannotStack: naming a draw or a metric that slots cannot do.
    """
    size = len(tensors_in(batch)[0])
    count = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)

    def observed(part: Any) -> Observed:
        return step.observe(copies_of(module, step.stand_ins.prefixes), part, count)

    with step.in_place():
        full = observed(batch)
        one = observed(map_tensors(lambda tensor: tensor[:1], batch)) if by_example else None
        draws = DrawnRows(full.draws, None if one is None else one.draws, num_slots, size)
    feed = MetricFeed(full.calls, None if one is None else one.calls, size)
    is_final = not full.draws and not full.has_dropout and not len(feed) and not full.metrics
    return Rehearsal(draws, feed, full.metrics, is_final)
