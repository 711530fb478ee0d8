"""How clients are to be trained, as the user says it: one after the other, or many at once.

How many clients Lightning's loop is given at once where they train one after the other.

Lightning spends 0.2 ms and more on each of its batches, which is a lot beside a client of a few
small steps, and nothing beside one of a second. So short clients come in groups, of at most about

    0.2 s ≥ clients · steps · (0.1 ms + 6 ns · examples · parameters)

by an estimate that errs on the long side: the progress bar moves and callbacks are called once per
group. It is a function of the model and the data, not of a measurement, because a checkpoint inside
a round counts groups. What a client sends does not depend on who is in its group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.engines import SPEEDUPS, Speedup

EngineName = Literal["auto", "sequential", "slots"]

# One client's step of a larger model fills a core by itself. A GPU waits for the next kernel of models
# of many times that size: ten clients of a ViT of 2.7 million trained three times as fast in slots.
_MOST_PARAMETERS, _MOST_ON_GPU = 2_000_000, 50_000_000
# What trains for fewer steps does not repay timing one client.
LEAST_STEPS = 500
# Compiling takes 5 to 20 seconds: fewer steps than this do not take so long where slots are faster.
SHORT_RUN_STEPS = 10_000
# A check takes as long as 5 to 10 clients in slots: together 1 to 2 % of the time.
SPOT_CHECK = 1 / 500
# In these nothing is rounded to half precision on the way.
FULL_PRECISIONS = ("32-true", "64-true")


@dataclass(frozen=True)
class EngineOptions:
    """Options for how clients train.

    Attributes:
        engine: how clients train.
        num_slots: clients at once; chosen by size if None.
        speedups: of the steps of clients that train one after the other; if None, ``auto``
            measures and the other engines use none.
        spot_check: fraction of clients in slots that are trained one after the other as well.
        pad_batches: whether the loss is a mean over examples; as the module says if None.
    """

    engine: EngineName = "auto"
    num_slots: int | None = None
    speedups: tuple[Speedup, ...] | None = None
    spot_check: float = SPOT_CHECK
    pad_batches: bool | None = None

    def pads(self, module: nn.Module) -> bool:
        """True if smaller batches may be padded: the option, else the module's ``loss_is_mean``.

        What a class says does not hold for a subclass with a ``training_step`` of its own.
        """
        if self.pad_batches is not None:
            return self.pad_batches
        for space in (vars(module), *map(vars, type(module).__mro__)):
            if "loss_is_mean" in space:
                return bool(space["loss_is_mean"])
            if "training_step" in space:
                break
        return False

    @property
    def spot_check_remark(self) -> str:
        """How many clients are checked, for the line that says how they train."""
        if self.spot_check == 0:
            return ", none of them checked (federation.spot_check: 0)"
        if self.spot_check == 1:
            return ", every client is trained both ways as a check"
        return f", one client in {1 / self.spot_check:.0f} is trained both ways as a check"

    def __post_init__(self) -> None:
        if self.num_slots is not None and self.num_slots < 1:
            raise ConfigurationError(
                f"federation: slots must be at least 1 client at once, got {self.num_slots}"
            )
        if not 0 <= self.spot_check <= 1:
            raise ConfigurationError(
                f"federation: spot_check must be in [0, 1], got {self.spot_check}: it is the fraction "
                "of clients that are trained both ways"
            )
        given = self.speedups or ()
        if not set(given) <= set(SPEEDUPS) or len(set(given)) < len(given):
            raise ConfigurationError(
                f"federation: speedups must be some of {', '.join(SPEEDUPS)}, each once, or null "
                f"to have them measured, got {list(given)}"
            )


def most_parameters(device: torch.device) -> int:
    """Return the size of model beyond which one client's step is enough work for a device."""
    return _MOST_ON_GPU if device.type == "cuda" else _MOST_PARAMETERS


def trains_in_large_groups(
    options: EngineOptions, module: nn.Module, device: torch.device, num_steps: float
) -> bool:
    """Return whether a round's clients should come in one group, so that slots can pack them.

    Args:
        options: what was asked for.
        module: the model.
        device: on which it trains.
        num_steps: local steps of the whole run, about.
    """
    if options.engine != "auto" or num_steps < LEAST_STEPS:
        return options.engine == "slots"
    params = [p for p in module.parameters() if p.requires_grad]
    if any(isinstance(p, nn.UninitializedParameter) for p in params):
        return False
    return sum(p.numel() for p in params) <= most_parameters(device)


GROUP_SECONDS = 0.2
_SECONDS_PER_STEP = 1e-4
# Forward and backward, on one core. Measured for steps on batches of 10 to 32: 0.5 ns for an MLP,
# 4 ns for a vision transformer.
_SECONDS_PER_PARAMETER = 6e-9
# A convolution uses its weights at every pixel, of which there are hundreds.
_USES_OF_A_KERNEL = 100


def num_short_clients(module: nn.Module, steps_per_client: float, batch_size: int) -> int:
    """Return how many clients to train between two looks at the loop, at least 1.

    Args:
        module: the model.
        steps_per_client: batches that a client trains on in a round, about, ≥ 1.
        batch_size: examples per batch.

    Example:
        >>> num_short_clients(nn.Linear(784, 62), steps_per_client=1, batch_size=20)
        33
        >>> num_short_clients(nn.Conv2d(3, 64, 3), steps_per_client=100, batch_size=20)
        1
    """
    uses = 0
    for parameter in module.parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            return 1
        uses += parameter.numel() * (_USES_OF_A_KERNEL if parameter.ndim > 2 else 1)
    step = _SECONDS_PER_STEP + _SECONDS_PER_PARAMETER * batch_size * uses
    return max(1, math.floor(GROUP_SECONDS / (steps_per_client * step)))
