"""Number of clients in a group, and limits that decide whether slots are tried.

Lightning spends 0.2 ms or more on each batch, which is much for a client of a few small steps, and
nothing for a client of a second. So short clients come in groups of at most about

    0.2 s ≥ clients · steps · (0.1 ms + 6 ns · examples · parameters)

by an estimate that errs on the long side: the progress bar moves once per group. It depends on model and
data, not on a measurement, because a checkpoint inside a round counts groups. A client's update does not
depend on its group.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

EngineName = Literal["auto", "sequential", "slots"]

# With more parameters, one client's step fills a core. A GPU needs far larger models: ten clients of a
# ViT of 2.7 million parameters trained three times as fast in slots.
_MOST_PARAMETERS, _MOST_ON_GPU = 2_000_000, 50_000_000
# Runs of fewer local steps do not repay timing one client.
LEAST_STEPS = 500
# Compiling takes 5 to 20 seconds: where slots are faster, fewer steps than this take less.
SHORT_RUN_STEPS = 10_000
# Default fraction of checked clients; a check takes as long as 5 to 10 clients in slots, 1 to 2 % in all.
SPOT_CHECK = 1 / 500
# Precisions without rounding to half precision.
FULL_PRECISIONS = ("32-true", "64-true")


def most_parameters(device: torch.device) -> int:
    """Return the most parameters of a model for which slots are tried on a device."""
    return _MOST_ON_GPU if device.type == "cuda" else _MOST_PARAMETERS


def trains_in_large_groups(
    engine: EngineName, module: nn.Module, device: torch.device, num_steps: float
) -> bool:
    """Return whether a round's clients should come in one group, so that slots can pack them.

    Args:
        engine: the option.
        module: the model.
        device: the device on which it trains.
        num_steps: approximate number of local steps of the whole run.
    """
    if engine != "auto" or num_steps < LEAST_STEPS:
        return engine == "slots"
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
    """Return the number of clients per group that take about 0.2 s together, at least 1.

    Args:
        module: the model.
        steps_per_client: approximate number of batches per client and round, ≥ 1.
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
