"""Batch norm statistics of sub-networks, from the examples that a run trains on.

In a federation every client sends sums of its own examples (`collect_sums`), which are added up; a
central run is one client. Examples are read without augmentation, in a fixed random order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.reading import evaluation_reader, loader_option
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.processes.shares import shares
from fl_lightning.federation.visits.visiting import visiting
from fl_lightning.nas.elastic.calibration import Sums, add_sums, collect_sums
from fl_lightning.nas.spaces.space import Architecture

_LEAST_BATCH = 128  # the statistics of smaller ones are coarse
_BYTES = 8  # of a number in a sum


class Recalibrated(NamedTuple):
    """What clients have sent.

    Attributes:
        sums: of every sub-network, over all clients.
        num_bytes: that they sent together.
    """

    sums: list[Sums]
    num_bytes: int


class _Owners(NamedTuple):
    """Training examples by owner: an owner's indices, and what makes a batch of indices."""

    indices: list[Tensor]
    read: Any
    batch_size: int


def has_statistics(network: nn.Module) -> bool:
    """Return whether there is anything to recalibrate."""
    norms = (m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return any(norm.running_mean is not None for norm in norms)


def recalibrated(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Architecture],
    *,
    max_examples: int | None,
    seed: int,
) -> Recalibrated | None:
    """Return the sums of sub-networks; to be called by all processes. The network is left as it was.

    Args:
        trainer: whose training data are read.
        network: of all sizes.
        architectures: of the sub-networks.
        max_examples: of all clients together, each in proportion to its own; None for all.
        seed: of which examples, and of their order.

    Returns:
        None if no training data are at hand, as where `Trainer.test` was given a loader.
    """
    owners = _owners(trainer)
    if owners is None:
        return None
    ranks = Ranks(trainer)
    sizes = np.array([len(indices) for indices in owners.indices])
    part = _part(owners, max_examples)
    mine = shares(sizes, ranks.size)[ranks.rank].tolist()
    found: list[list[Sums]] = [[] for _ in architectures]
    with visiting(trainer, "validation", mode="eval") as visit:
        for owner in mine:
            batches = partial(_batches, owners, owner, part, seed)
            for sums, architecture in zip(found, architectures, strict=True):

                def run(batch: Any, architecture: Architecture = architecture) -> None:
                    with trainer.precision_plugin.forward_context():
                        network(batch[0], architecture)

                own = collect_sums(network, run, map(visit.prepared, batches()))
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
    owners = _owners(trainer)
    if owners is None:
        return None
    part = _part(owners, max_examples)
    everyone = range(len(owners.indices))
    return (batch for owner in everyone for batch in _batches(owners, owner, part, seed))


def _part(owners: _Owners, max_examples: int | None) -> float:
    """Return the share of its examples that each owner reads."""
    total = sum(len(indices) for indices in owners.indices)
    return 1.0 if max_examples is None else min(1.0, max_examples / max(1, total))


def _owners(trainer: Trainer) -> _Owners | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, FederatedDataModule):
        federated = any(isinstance(c, Federation) for c in trainer.callbacks)  # type: ignore[attr-defined]
        clients = data.clients
        indices = [clients[i] for i in range(len(clients))]
        return _Owners(
            indices if federated else [torch.cat(indices)], data.evaluation_batch, data.batch_size
        )
    loader = trainer.train_dataloader
    if loader is None and data is not None:
        loader = data.train_dataloader()
    if loader is None or not hasattr(loader, "dataset") or not hasattr(loader.dataset, "__len__"):
        return None
    everything = [torch.arange(len(loader.dataset))]
    return _Owners(everything, evaluation_reader(loader), loader_option(loader, "batch_size") or 32)


def _batches(owners: _Owners, owner: int, part: float, seed: int) -> Iterator[Any]:
    """Yield an owner's examples, none of them alone: a batch of one has no variance."""
    indices = owners.indices[owner]
    order = torch.randperm(len(indices), generator=torch_generator(seed, "recalibration", owner))
    chosen = indices[order[: max(2, math.ceil(part * len(indices)))]]
    if len(chosen) > 1:
        for some in chosen.tensor_split(
            max(1, len(chosen) // max(owners.batch_size, _LEAST_BATCH))
        ):
            yield owners.read(some)
