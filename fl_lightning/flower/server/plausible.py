"""What a client's answer may say beside its update: what a site that means it could have written."""

from __future__ import annotations

import torch

from fl_lightning.flower.messages import ClientAnswer

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_STEPS = 2**40


def check_plausible(answer: ClientAnswer, num_examples: int, *, counts_steps: bool) -> None:
    """Refuse an answer whose numbers the server could not use.

    Args:
        answer: of a client that has not failed.
        num_examples: that its site has said it has.
        counts_steps: whether the aggregator asks how many gradients an update adds up to.

    Raises:
        ValueError: with what is wrong.
    """
    if answer.num_examples != num_examples:
        raise ValueError(
            f"its update is of {answer.num_examples} examples, and its site has said that it has "
            f"{num_examples}"
        )
    steps = answer.optimizer_steps
    of_optimizers = steps if isinstance(steps, tuple) else () if steps is None else (steps,)
    if not 0 < answer.num_steps <= MOST_STEPS or max(of_optimizers, default=0) > MOST_STEPS:
        raise ValueError(f"it says that it took {answer.num_steps} steps, of optimizers {steps}")
    effective = answer.effective_steps
    if counts_steps and not (effective is not None and 0 < effective <= MOST_STEPS):
        raise ValueError(f"its update adds up {effective} gradients")
    for name, metric in answer.metrics.items():
        if metric.dtype not in (*_REAL, *_WHOLE):
            raise ValueError(f"its metric {name} is of {metric.dtype}")
