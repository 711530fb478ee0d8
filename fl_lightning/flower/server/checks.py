"""Checks at the server: of the configuration, before any site is asked, and of each client's answer.

An answer may say beside its update what an honest site could have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import conflicts
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Options, network_parts, shown_by
from fl_lightning.flower.messages import ClientAnswer

SCALED = "16-mixed"  # a precision


def check_over_network(trainer: Trainer, module: Any, data: Any, options: Options) -> None:
    """Refuse what has no meaning over a network, or would say there what is not true.

    Raises:
        ConfigurationError: all of it at once.
    """
    problems = [
        *conflicts(network_parts(trainer, module, options)),
        *_of_trainer(trainer),
        *_of_data(data),
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _of_trainer(trainer: Trainer) -> Iterator[str]:
    if trainer.world_size > 1:
        yield (
            f"trainer.devices: the server is one process, got {trainer.world_size}: set devices to 1; "
            "sites have devices of their own"
        )


def _of_data(data: Any) -> Iterator[str]:
    if not isinstance(data, FederatedDataModule):
        yield (
            "data: over a network the configuration is that of a federation: wrap the data module in "
            "fl_lightning.FederatedDataModule"
        )
    else:
        yield from of_transforms(data)


def of_transforms(data: FederatedDataModule) -> Iterator[str]:
    """Say which transforms of inputs cannot be where each site knows its own clients only."""
    for transform in data.transforms:
        if shown_by([transform]):
            yield (
                f"data.transforms {type(transform).__name__} learns from all clients' examples, which are at "
                "sites: use Normalize with numbers that are known, in the configurations of server and sites"
            )


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
