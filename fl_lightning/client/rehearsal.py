"""What a training step will do in slots, found out by running it on one batch beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.drawn_rows import DrawnRows
from fl_lightning.client.functional_step import TrainingStep, map_tensors
from fl_lightning.client.metric_feed import MetricFeed
from fl_lightning.core.seeds import preserve_global_generators


@dataclass(frozen=True)
class Rehearsal:
    """What was found.

    Attributes:
        draws: the step's random numbers.
        feed: the metrics that it updates.
        metrics: those that it logs, by name.
    """

    draws: DrawnRows
    feed: MetricFeed
    metrics: dict[str, Metric]

    @property
    def found_nothing(self) -> bool:
        """Whether the step is arithmetic only."""
        return not self.draws.numbers and not len(self.feed) and not self.metrics


def rehearse(
    step: TrainingStep, module: nn.Module, batch: Any, *, num_slots: int, by_example: bool
) -> Rehearsal:
    """Run the step on a full batch, and on one example of it, without consequences.

    Args:
        step: of the module.
        module: its parameters are what they are, its buffers are left alone.
        batch: a full one.
        num_slots: G.
        by_example: whether the stacked step evaluates example by example.

    Raises:
        CannotStack: naming a draw or a metric that slots cannot do.
    """
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(len(tensor)) or tensor, batch)  # type: ignore[func-returns-value]
    size = sizes[0]
    count = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)

    def observed(part: Any) -> Any:
        buffers: dict[str, Tensor] = {n: b.clone() for n, b in module.named_buffers()}
        return step.observe(buffers, part, count)

    with preserve_global_generators(), step.stand_ins.in_place():
        full = observed(batch)
        one = observed(map_tensors(lambda tensor: tensor[:1], batch)) if by_example else None
        draws = DrawnRows(full.draws, one and one.draws, num_slots, size)
    return Rehearsal(draws, MetricFeed(full.calls, one and one.calls, size), full.metrics)
