"""How many clients Lightning's loop is given at once where they train one after the other.

Lightning spends 0.2 ms and more on each of its batches, which is a lot beside a client of a few
small steps, and nothing beside one of a second. So short clients come in groups, of at most about

    0.2 s ≥ clients · steps · (0.1 ms + 6 ns · examples · parameters)

by an estimate that errs on the long side: the progress bar moves and callbacks are called once per
group. It is a function of the model and the data, not of a measurement, because a checkpoint inside
a round counts groups. What a client sends does not depend on who is in its group.
"""

from __future__ import annotations

import math

from torch import nn

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
