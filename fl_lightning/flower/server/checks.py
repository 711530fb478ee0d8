"""What cannot be where clients are at sites, said before any of them is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import conflicts
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Options, network_parts, shown_by

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
