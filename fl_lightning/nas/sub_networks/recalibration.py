"""Batch norm statistics of sub-networks, from the examples that a run trains on.

In a federation every client sends sums of its own examples (`collect_sums`), which are added up; a
central run is one client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import Trainer
from torch import nn

from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.processes.shares import shares
from fl_lightning.federation.visits.visiting import visiting
from fl_lightning.nas.elastic.calibration import Sums, add_sums, collect_sums
from fl_lightning.nas.sub_networks.training_examples import TrainingExamples

_BYTES = 8  # of a number in a sum


class Recalibrated(NamedTuple):
    """What clients have sent.

    Attributes:
        sums: of every sub-network, over all clients.
        num_bytes: that they sent together.
    """

    sums: list[Sums]
    num_bytes: int


def has_statistics(network: nn.Module) -> bool:
    """Return whether there is anything to recalibrate."""
    norms = (m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return any(norm.running_mean is not None for norm in norms)


def check_personal(personal: Personalisation | None, network: nn.Module) -> None:
    """Refuse models of clients beside the shared one, whose statistics nobody recalibrates.

    Args:
        personal: of the federation.
        network: that is recalibrated.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    if personal is not None and personal.beside and has_statistics(network):
        raise ConfigurationError(
            f"federation.personal {type(personal).__name__} gives each client a model beside the shared "
            "one, and batch norm statistics are recalibrated for the shared one alone: use Personal or "
            "FineTuned, or a space without batch norm (fl_lightning.nas.ViT)"
        )


def recalibrated(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    *,
    max_examples: int | None,
    seed: int,
) -> Recalibrated | None:
    """Return the sums of sub-networks; to be called by all processes. The network is left as it was.

    Args:
        trainer: whose training data are read.
        network: of all sizes, or of all cells.
        architectures: of the sub-networks, as the network takes them beside images.
        max_examples: of all clients together, each in proportion to its own; None for all.
        seed: of which examples, and of their order.

    Returns:
        None if no training data are at hand, as where `Trainer.test` was given a loader.
    """
    examples = TrainingExamples.of(trainer, max_examples=max_examples, seed=seed)
    if examples is None:
        return None
    ranks = Ranks(trainer)
    sizes = np.array([len(indices) for indices in examples.indices])
    mine = shares(sizes, ranks.size)[ranks.rank].tolist()
    found: list[list[Sums]] = [[] for _ in architectures]
    with visiting(trainer, "validation", mode="eval") as visit:
        for owner in mine:
            for sums, architecture in zip(found, architectures, strict=True):

                def run(batch: Any, architecture: Any = architecture) -> None:
                    with trainer.precision_plugin.forward_context():
                        network(batch[0], architecture)

                own = collect_sums(network, run, map(visit.prepared, examples.batches(owner)))
                if own:
                    sums.append({name: tensor.cpu() for name, tensor in own.items()})
    num_bytes = sum(_BYTES * t.numel() for sums in found for own in sums for t in own.values())
    told = ranks.gather((num_bytes, [reduce(add_sums, sums) if sums else {} for sums in found]))
    together = []
    for number in range(len(architectures)):
        pieces = [sums[number] for _, sums in told if sums[number]]
        together.append(reduce(add_sums, pieces) if pieces else {})
    return Recalibrated(together, sum(num_bytes for num_bytes, _ in told))


def training_batches(
    trainer: Trainer, *, max_examples: int | None, seed: int
) -> Iterator[Any] | None:
    """Yield the batches that `recalibrated` reads, owner by owner, before they are on a device.

    Args:
        trainer: of one process, whose training data are read.
        max_examples: of all clients together, each in proportion to its own; None for all.
        seed: of which examples, and of their order.

    Returns:
        None if no training data are at hand.
    """
    examples = TrainingExamples.of(trainer, max_examples=max_examples, seed=seed)
    if examples is None:
        return None
    owners = range(len(examples.indices))
    return (batch for owner in owners for batch in examples.batches(owner))
