"""Evaluation of sub-networks in shared weights: batch norm statistics, and accuracy.

    mean = Σx / n,   variance = (Σx² - (Σx)² / n) / (n - 1),   per channel over examples and pixels

The sums are added over batches, clients and processes: in a federation every client sends the sums of its own
examples; a central run is one client. Only training examples are used, without augmentation, in a fixed
random order.
While sums are collected, every layer normalises by its batch, as in training, so that inputs of a layer do
not depend on old statistics. Every sub-network has statistics of its own.

Accuracy is that of the shared weights, without further training:

    accuracy(a) = Σ_owners correct answers of a / Σ_owners examples,   with statistics of a

An owner is a client, or the whole training set in a central run. `training_accuracies` counts on training
examples during a run: clients send counts, and the sums of statistics. `SubNetworkScore` is the accuracy on
validation examples of a trained supernet, as the objective of a search.
Sources: Cai et al. 2020 (Once-for-All), section 3.3; Yu et al. 2020 (BigNAS), section 3.2, "batch norm
calibration". Differs: the papers average the statistics of batches; sums weigh all examples alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, final

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.client.personal import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import modes_kept
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.training_set import TrainingSet
from fl_lightning.federation import ExampleOwners, Ranks, clients_as_owners, shares, visiting
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.reports.progress import federation_of

# name of a batch norm -> n, Σx and Σx² per channel, float64 of shape (3, channels)
Sums = dict[str, Tensor]
Context = Callable[[], AbstractContextManager[Any]]  # of a forward pass, e.g. mixed precision
# number of examples by client -> sums of every sub-network, client by client in this order
SumsOfOwners = Callable[[Mapping[int, int]], Iterator[list[Sums]]]

_BYTES = 8  # per number in a sum


def batch_norms(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the batch norm layers of a network, with their names."""
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm):
            yield name, layer


def has_statistics(network: nn.Module) -> bool:
    """True if any batch norm of the network has running statistics."""
    return any(norm.running_mean is not None for _, norm in batch_norms(network))


def check_personal(personal: Personalisation | None, network: nn.Module) -> None:
    """Raise ConfigurationError if clients have personal models beside a shared network with batch norm."""
    if personal is not None and personal.beside and has_statistics(network):
        raise ConfigurationError(
            f"federation.personal {type(personal).__name__} gives each client a model beside the shared one, and "
            "batch norm statistics are recalibrated for the shared one only: use Personal or FineTuned, or a space "
            "without batch norm (fl_lightning.nas.ViT)"
        )


def recalibrated(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    examples: TrainingExamples,
    *,
    remote: SumsOfOwners | None = None,
) -> tuple[list[Sums], int]:
    """Return sums for sub-networks' batch norm statistics, over training examples; every process must call this.

    The network does not change.

    Args:
        trainer: trainer of the run.
        network: network that contains the sub-networks.
        architectures: sub-networks, as second arguments of the network.
        examples: training examples.
        remote: returns the sums of remote clients; None if this program has the examples.

    Returns:
        The sums of every sub-network over all owners, and the number of bytes that all owners sent.
    """
    if not any(batch_norms(network)):
        return [{} for _ in architectures], 0
    ranks = Ranks(trainer)
    found: list[list[Sums]] = [[] for _ in architectures]
    asked = {owner: examples.counts[owner] for owner in examples.share(ranks)}
    of_owners = remote or partial(sums_of_owners, trainer, network, architectures, examples)
    for own in of_owners({owner: count for owner, count in asked.items() if count}):
        for sums, of_one in zip(found, own, strict=True):
            if of_one:
                sums.append(of_one)
    num_bytes = sum(_BYTES * t.numel() for sums in found for own in sums for t in own.values())
    told = ranks.gather((num_bytes, [reduce(add_sums, sums) if sums else {} for sums in found]))
    of_each = zip(*(sums for _, sums in told), strict=True)  # by sub-network, of the processes
    kept = [[own for own in pieces if own] for pieces in of_each]
    together = [reduce(add_sums, pieces) if pieces else {} for pieces in kept]
    return together, sum(num_bytes for num_bytes, _ in told)


def sums_of_owners(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    examples: TrainingExamples,
    owners: Iterable[int],
) -> Iterator[list[Sums]]:
    """Yield, for each owner of examples (client), every sub-network's sums for batch norm statistics, on the CPU."""
    with visiting(trainer, "validation", mode="eval") as visit:
        for owner in owners:
            found: list[Sums] = []
            for architecture in architectures:
                run = partial(_run, network, trainer.precision_plugin.forward_context, architecture)
                own = collect_sums(network, run, map(visit.prepared, examples.batches(owner)))
                found.append({name: tensor.cpu() for name, tensor in own.items()})
            yield found


def _run(network: nn.Module, context: Context, architecture: Any, batch: Any) -> None:
    with context():
        network(batch[0], architecture)


def collect_sums(network: nn.Module, run: Callable[[Any], Any], batches: Iterable[Any]) -> Sums:
    """Return count, sum and sum of squares, per channel, of the inputs of each batch norm that runs.

    The network does not change.

    Args:
        network: network with batch norms.
        run: runs the network on a batch, e.g. ``lambda batch: network(batch[0], architecture)``.
        batches: batches of examples.
    """
    sums: Sums = {}
    layers = dict(batch_norms(network))
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: _add(sums, name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad(), _batch_statistics(network, layers.values()):
            for batch in batches:
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def add_sums(left: Sums, right: Sums) -> Sums:
    """Add a sub-network's sums for batch norm statistics over two sets of examples.

    Raises:
        ConfigurationError: if the sums are of sub-networks of different sizes.
    """
    if {name: own.shape for name, own in left.items()} != {
        n: own.shape for n, own in right.items()
    }:
        raise ConfigurationError(
            "sums of batch norms of different sizes cannot be added: they are of different sub-networks"
        )
    return {name: own + right[name] for name, own in left.items()}


def apply_sums(network: nn.Module, sums: Sums) -> None:
    """Compute batch norm means and variances from sums of inputs, and write them into a network.

    Args:
        network: a plain network, or a supernet, where only the first channels are written.
        sums: count, sum and sum of squares of each batch norm's inputs, over all examples.

    Raises:
        ConfigurationError: if a layer saw fewer than two values per channel.
    """
    for name in sums:
        layer: Any = network.get_submodule(name)
        mean, variance = _mean_and_variance(name, sums)
        with torch.no_grad():
            layer.running_mean[: len(mean)] = mean.to(layer.running_mean)
            layer.running_var[: len(mean)] = variance.to(layer.running_var)


@contextmanager
def normalised_by(network: nn.Module, sums: Sums) -> Iterator[None]:
    """Return a context in which batch norms use means and variances computed from sums (evaluation mode only).

    Args:
        network: network with the batch norms; layers that the sums do not name are unchanged.
        sums: count, sum and sum of squares of each batch norm's inputs, over all examples.

    Raises:
        ConfigurationError: if a layer saw fewer than two values per channel.
    """
    layers: dict[str, Any] = {name: network.get_submodule(name) for name in sums}
    before = {name: (layer.running_mean, layer.running_var) for name, layer in layers.items()}
    like = next(network.parameters())
    try:
        for name, layer in layers.items():
            mean, variance = _mean_and_variance(name, sums)
            layer.running_mean, layer.running_var = mean.to(like), variance.to(like)
        yield
    finally:
        for name, layer in layers.items():
            layer.running_mean, layer.running_var = before[name]


def _mean_and_variance(name: str, sums: Sums) -> tuple[Tensor, Tensor]:
    counts, totals, squares = sums[name]
    if counts[0] < 2:
        raise ConfigurationError(
            f"batch norm {name} needs at least 2 numbers per channel for a variance, and saw {int(counts[0])}: raise "
            "model.recalibration_examples, or use larger images"
        )
    mean = totals / counts
    return mean, ((squares - totals * mean) / (counts - 1)).clamp(min=0)


def _add(sums: Sums, name: str, x: Tensor) -> None:
    numbers = x.detach().transpose(0, 1).flatten(1).double()
    counts = torch.full((len(numbers),), float(numbers.shape[1]), dtype=torch.float64)
    own = torch.stack([counts.to(x.device), numbers.sum(1), numbers.square().sum(1)])
    sums[name] = sums[name] + own if name in sums else own


@contextmanager
def _batch_statistics(network: nn.Module, norms: Collection[nn.Module]) -> Iterator[None]:
    """Return a context in evaluation mode in which batch norms use their batch; then restore modes and buffers."""
    buffers = [buffer for layer in norms for buffer in layer.buffers(recurse=False)]
    kept = [buffer.clone() for buffer in buffers]
    with modes_kept(network):
        network.eval()
        for layer in norms:
            layer.train()
        try:
            yield
        finally:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)


_LEAST_BATCH = 128  # statistics of smaller batches are coarse


@dataclass(frozen=True, eq=False)
class TrainingExamples:
    """Random training examples by owner: a client, or the whole training set in a central run.

    Attributes:
        owners: the owners and their examples; batches here may be larger than `ExampleOwners.batch_size`.
        counts: number of examples to read by owner: 0, or at least two.
        seed: seed of the choice and order of the examples.
    """

    owners: ExampleOwners
    counts: Mapping[int, int]
    seed: int

    @classmethod
    def of(
        cls, trainer: Trainer, *, max_examples: int | None, seed: int
    ) -> TrainingExamples | None:
        """Return random training examples of a run; None without training data, e.g. in `Trainer.test` with a loader.

        Args:
            trainer: trainer with the training data.
            max_examples: number of examples over all owners, in proportion to their data; None for all.
            seed: seed of the choice and order of the examples.
        """
        owners = _owners(trainer)
        if owners is None:
            return None
        sizes = owners.shards.num_examples.tolist()
        part = 1.0 if max_examples is None else min(1.0, max_examples / max(1, sum(sizes)))
        counts = {
            owner: min(size, max(2, math.ceil(part * size))) if size > 1 else 0
            for owner, size in enumerate(sizes)
        }
        return cls(owners, counts, seed)

    def share(self, ranks: Ranks) -> list[int]:
        """Return the numbers of the owners (clients) whose examples this process reads."""
        mine: list[int] = shares(self.owners.shards.num_examples, ranks.size)[ranks.rank].tolist()
        return mine

    def batches(self, owner: int) -> Iterator[Any]:
        """Yield an owner's examples in batches of at least two, since one example has no variance."""
        indices = self.owners.shards[owner]
        order = torch.randperm(
            len(indices), generator=torch_generator(self.seed, "recalibration", owner)
        )
        chosen = indices[order[: self.counts[owner]]]
        if len(chosen) > 1:
            for some in chosen.tensor_split(
                max(1, len(chosen) // max(self.owners.batch_size, _LEAST_BATCH))
            ):
                yield self.owners.read(some)


def _owners(trainer: Trainer) -> ExampleOwners | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, FederatedDataModule):
        clients = clients_as_owners(data)
        if federation_of(trainer) is not None:
            return clients
        return replace(clients, shards=FlatShards.of([data.clients.indices]))
    loader = trainer.train_dataloader
    if loader is None and data is not None:
        loader = data.train_dataloader()
    if loader is None or not hasattr(loader, "dataset") or not hasattr(loader.dataset, "__len__"):
        return None
    training = TrainingSet(loader)
    shards, size = FlatShards.of([np.arange(len(training))]), training.option("batch_size") or 32
    return ExampleOwners(shards, training.reader(), size)


def training_accuracies(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    examples: TrainingExamples,
) -> list[float] | None:
    """Return each sub-network's accuracy on training examples, in [0, 1]; None if no client has two examples.

    Arguments are those of `recalibrated`. All processes call this; the network does not change.
    """
    sums, _ = recalibrated(trainer, network, architectures, examples)
    ranks, parts = Ranks(trainer), list(zip(architectures, sums, strict=True))
    with visiting(trainer, "validation", mode="eval") as visit:
        batches = (batch for owner in examples.share(ranks) for batch in examples.batches(owner))
        prepared = map(visit.prepared, batches)
        right, total = _counted(network, parts, prepared, trainer.precision_plugin.forward_context)
    told = ranks.gather((right, total))
    total = sum(number for _, number in told)
    counted = torch.stack([own for own, _ in told]).sum(0).double()
    return (counted / total).tolist() if total else None


def _counted(
    network: nn.Module,
    parts: Sequence[tuple[Any, Sums]],
    batches: Iterable[tuple[Tensor, Tensor]],
    context: Context,
) -> tuple[Tensor, int]:
    """Return how many answers of each sub-network, under its batch norm statistics, are correct, and the total."""
    right, total = torch.zeros(len(parts), dtype=torch.int64), 0
    with torch.no_grad():
        for images, labels in batches:
            total += len(labels)
            for number, (architecture, own) in enumerate(parts):
                with context(), normalised_by(network, own):
                    answers = network(images, architecture).argmax(1)
                right[number] += int((answers == labels).sum())
    return right, total


# returns batches of images and labels
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """Search score of a sub-network: its accuracy on validation examples, deterministic.

    Attributes:
        network: trained network whose ``forward(images, architecture)`` runs a sub-network.
        training: returns training batches of at least two examples, for the batch norm statistics; called
            once per score if the network has batch norm.
        validation: returns the batches of validation examples; called once per score.
        context: makes the context of every forward pass, e.g. mixed precision.
    """

    network: nn.Module
    training: Batches
    validation: Batches
    context: Context = nullcontext

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy of an architecture, in [0, 1]."""
        with modes_kept(self.network):
            self.network.eval()
            sums: Sums = {}
            if any(batch_norms(self.network)):
                run = partial(_run, self.network, self.context, architecture)
                sums = collect_sums(self.network, run, self.training())
            parts = [(architecture, sums)]
            right, total = _counted(self.network, parts, self.validation(), self.context)
        return int(right) / total
