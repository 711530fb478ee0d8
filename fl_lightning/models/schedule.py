"""Schedules of the learning rate over rounds, as factors of the optimizer's rate.

With w = warmup_rounds, T = num_rounds and t = round - w, counted from the end of the warm-up:

    warm-up      (round + 1) / (w + 1)                                     round < w
    constant     1
    cosine       f + (1 - f) * (1 + cos(pi * t / (T - w))) / 2             f = final_factor
    step         step_factor ** floor(t / step_every)
    exponential  max(f, step_factor ** (t / step_every))

Sources: the cosine is Loshchilov and Hutter 2017, ICLR, equation 5, without restarts; the decay with a
constant end is Yu et al. 2020, ECCV (BigNAS), section 3.1.
A cosine reaches `final_factor` after the last round and stays there: a last round at rate 0 would train
nothing (and with privacy only add noise). For the same reason the warm-up does not start at 0.
A round is one of Lightning's epochs, so the same schedule works for a run without federation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from fl_lightning.core.errors import ConfigurationError, check_range, raise_together

Kind = Literal["constant", "cosine", "step", "exponential"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over the rounds: warm-up, then constant (default) or falling.

    Args:
        kind: schedule after the warm-up.
        warmup_rounds: rounds of linear increase before the full learning rate, at least 0.
        step_every: rounds between two steps, at least 1; ``exponential`` decays smoothly over them.
        step_factor: factor of each step, in (0, 1]; for ``kind="step"`` and ``"exponential"``.
        final_factor: final factor, in [0, 1]: of a cosine in the round after the last one, and the lower
            bound of an exponential decay.

    Example:
        >>> schedule = Schedule("cosine", warmup_rounds=1)
        >>> [round(schedule.factor(t, 4), 2) for t in range(4)]
        [0.5, 1.0, 0.75, 0.25]
    """

    kind: Kind = "constant"
    warmup_rounds: int = 0
    step_every: int = 30
    step_factor: float = 0.1
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        rules = {
            "warmup_rounds": "at least 0",
            "step_every": "at least 1 round",
            "step_factor": "in (0, 1]",
            "final_factor": "in [0, 1]",
        }
        advice = ". Values of a schedule are factors of the optimizer's lr, times are rounds."
        raise_together(
            *(
                partial(check_range, f"schedule: {name}", getattr(self, name), allowed, advice)
                for name, allowed in rules.items()
            )
        )

    def factor(self, round: int, num_rounds: int) -> float:
        """Return the factor by which the learning rate is multiplied in a round.

        Args:
            round: number of the round, from 0.
            num_rounds: rounds of the whole run; only the cosine uses it.

        Raises:
            ConfigurationError: for a cosine in a run without end.
        """
        if self.kind == "cosine" and num_rounds < 1:
            raise ConfigurationError(
                "schedule.kind: 'cosine' needs to know the last round, but the run has no number "
                f"of rounds (got {num_rounds}). Set trainer.max_epochs, or use 'constant', 'step' or 'exponential'."
            )
        if round < self.warmup_rounds:
            return (round + 1) / (self.warmup_rounds + 1)
        elapsed = round - self.warmup_rounds
        if self.kind == "cosine":
            return self._cosine(elapsed, num_rounds - self.warmup_rounds)
        if self.kind == "step":
            return float(self.step_factor ** (elapsed // self.step_every))
        if self.kind == "exponential":
            return max(self.final_factor, float(self.step_factor ** (elapsed / self.step_every)))
        return 1.0

    def _cosine(self, elapsed: int, length: int) -> float:
        # if the run ends with its warm-up, the length is 0
        progress = min(elapsed / max(length, 1), 1.0)
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2


def scheduled(
    module: LightningModule, make: OptimizerCallable, schedule: Schedule | None
) -> OptimizerLRScheduler:
    """Return what `configure_optimizers` needs: the optimizer of trainable parameters, with any schedule."""
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    if schedule is None:
        return optimizer
    num_rounds = module.trainer.max_epochs or -1  # -1 is Lightning's "no end"
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda round: schedule.factor(round, num_rounds)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
