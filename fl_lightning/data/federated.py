"""`FederatedDataModule`: any LightningDataModule, with its training set divided among clients.

It wraps a data module without changing it: validation, test and prediction loaders are the source's. If the
source has no test set, all clients' test examples together are the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import Integers, run_seed
from fl_lightning.data.client_examples import (
    Change,
    ExampleTransform,
    Poison,
    changed_reader,
    check_poison,
    owners_of,
    poisoned_examples,
    transforms_of,
)
from fl_lightning.data.columns import Column, are_classes, as_labels, quantile_bins, read_column
from fl_lightning.data.forwarding import ForwardingDataModule
from fl_lightning.data.inputs import (
    InputTransform,
    Transform,
    fit_transforms,
    on_inputs,
    with_transforms,
)
from fl_lightning.data.partitions.partition import IID, Partition
from fl_lightning.data.roles import Roles, check_drawn_once, check_fractions, divide, partners
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.summary import PartitionSummary, partition_fingerprint
from fl_lightning.data.training_set import Read

MAX_CLIENTS_COUNTED = 10_000  # clients whose classes `FederatedDataModule.summary` counts
STATISTICS = (
    "batch_norm/sums"  # name under which remote clients send sums for batch norm statistics
)
_CENTRAL = "all examples of a central run"  # instead of a partition's fingerprint in checkpoints


class FederatedDataModule(ForwardingDataModule):
    """A data module whose training set is divided among clients.

    Without a `Federation` it trains centrally on its source's training loader. Attributes that it does
    not have, e.g. ``num_classes`` or hyperparameters, are the source's.

    Args:
        source: any data module whose ``train_dataloader`` is one `DataLoader` over a map-style data
            set. Its batch size, ``drop_last``, collate function and evaluation loaders are used.
            Every client shuffles its own examples. Examples that a sampler leaves out belong to no
            client; a `WeightedRandomSampler` weighs inside each client; other samplers are rejected.
        num_clients: number of clients; not needed if the partition determines it (natural ids).
        partition: rule that divides the examples among the clients; `IID` if None.
        batch_size: examples per local batch; the source's if None.
        client_val_fraction: share of every client's examples, in [0, 1), for validating the client,
            which never trains on them.
        client_test_fraction: share of every client's examples, in [0, 1), for testing the client;
            disjoint from the other two parts. If the source has no test set, the shares of all clients
            together are the test set.
        search_fraction: for a search over architectures: share of each client's training examples, in
            (0, 0.5], that trains the choices of the architecture instead of the weights; 0 for none.
            Batches then are ``{train: …, search: …}``, in a central run as well.
        transforms: transforms of the inputs of every batch, in training and in evaluation, e.g.
            `FederatedNormalize`; in a central run as well.
        example_transforms: transforms of every client's examples, inputs and labels, before
            ``transforms``, that may differ between clients, e.g. `QuarterTurns`. Partitions use the
            original labels. A central run pools the clients' transformed examples.
        labels: one label per example: the name of an attribute of the data set, of a column (as in
            data sets of Hugging Face), or of a key of its items; or a function of the data set, or its
            import path; or a list, in Python also an array or tensor. Strings and one-hot rows are
            allowed. If None, the attribute called targets, labels, y, target or label, the last tensor
            of a tensor data set, or the second part of every item.
        bins: number of quantiles, ≥ 2. Partitions by class then divide by the quantiles of the labels,
            for targets that are real numbers or many integers.
        update_weight: column of whole numbers ≥ 0, whose sum over a client's training examples weights its
            update, e.g. ``answer_tokens`` of `Completions`; None counts the examples.
        ignore_sampler: whether to ignore the source's sampler or batch sampler; every client then
            shuffles all of its examples.
        seed: seed of partition and held-out parts; the run's seed if None.

    Raises:
        ConfigurationError: for values out of range and data that cannot be divided.

    Example:
        >>> from fl_lightning.data import Digits
        >>> data = FederatedDataModule(Digits(seed=0), num_clients=10, seed=0)
        >>> data.prepare_data(), data.setup("fit")
        (None, None)
        >>> len(data.clients), int(data.clients.num_examples.sum())
        (10, 1294)
    """

    def __init__(
        self,
        source: LightningDataModule,
        *,
        num_clients: int | None = None,
        partition: Partition | None = None,
        batch_size: int | None = None,
        client_val_fraction: float = 0.0,
        client_test_fraction: float = 0.0,
        search_fraction: float = 0.0,
        transforms: list[InputTransform] | None = None,
        example_transforms: list[ExampleTransform] | None = None,
        labels: Column | None = None,
        bins: int | None = None,
        update_weight: Column | None = None,
        ignore_sampler: bool = False,
        seed: int | None = None,
    ) -> None:
        if isinstance(source, FederatedDataModule):
            raise ConfigurationError(
                "source must be a data module whose examples have no clients yet, got a "
                "FederatedDataModule: give its source"
            )
        super().__init__(source, ignore_sampler=ignore_sampler)
        check_range("bins", bins, "at least 2", ": null divides by the labels")
        check_range("num_clients", num_clients, "at least 1")
        check_range("batch_size", batch_size, "at least 1 example")
        check_fractions(client_val_fraction, client_test_fraction, search_fraction)
        self.num_clients = num_clients
        self.partition = partition if partition is not None else IID()
        self.client_val_fraction = client_val_fraction
        self.client_test_fraction = client_test_fraction
        self.search_fraction = search_fraction
        self.transforms = list(transforms or [])
        self.example_transforms = list(example_transforms or [])
        self.label_column, self.bins = labels, bins
        self.update_weight = update_weight
        self.seed = run_seed(seed)
        self._batch_size = batch_size
        self._rounds: Any = None
        self._poison: tuple[Tensor, Change] | None = None  # attacker of each example, or -1
        # fingerprint of the partition that the model was trained on; None for this one, or if unknown
        self._trained_on: str | None = None
        if client_test_fraction:  # set here: Lightning takes a method of the class for a test set
            self.test_dataloader = self._test_sets  # type: ignore[method-assign]

    @override
    def changed(self, loaders: Any) -> Any:
        if not self.transforms:
            return loaders
        return with_transforms(loaders, lambda: self.fitted_transforms)

    @cached_property
    def fitted_transforms(self) -> list[Transform]:
        """The option `transforms` as functions from inputs to inputs, fitted to all clients' training examples."""
        return fit_transforms(self.transforms, self.clients, self._read(augmented=False))

    def _test_sets(self) -> Any:
        """Return the test loaders of the source data module, or else a loader of all clients' held-out test examples."""
        has_one = is_overridden("test_dataloader", self.source, LightningDataModule)
        loaders = self.changed(self.source.test_dataloader()) if has_one else []
        return self._clients_test_set() if loaders == [] else loaders

    def _clients_test_set(self) -> Any:
        if self.leakage is not None:
            rank_zero_warn(f"test: no examples are left to test on: {self.leakage}")
            return []
        examples = torch.from_numpy(self.held_out("test").indices).long()
        rank_zero_info(
            f"test set: the {len(examples):,} test examples of all clients together, because "
            f"{type(self.source).__name__} has no test set of its own"
        )
        batches: Any = [some for some in examples.split(self.batch_size) if len(some)]
        read: Any = self.evaluation_batch
        return DataLoader(batches, batch_size=None, collate_fn=read)

    def train_dataloader(self) -> Any:
        """Return the clients of every round if training is federated, else the loader for central training."""
        if self._rounds is not None:
            return self._rounds
        if self.search_fraction or self.example_transforms:
            return self.training.pooled(self.train_indices, self.batch_size, self.train_batch)
        self._trained_on = _CENTRAL
        return self.changed(self.source.train_dataloader())

    def train_in_rounds(self, rounds: Any) -> None:
        """Train by federated rounds: `train_dataloader` then returns ``rounds``. None restores central training."""
        self._rounds = rounds
        if rounds is not None:
            self._trained_on = None

    @property
    def trains_in_rounds(self) -> bool:
        """True if training is federated: `train_dataloader` returns rounds of clients, not batches."""
        return self._rounds is not None

    @property
    def train_indices(self) -> Tensor:
        """Indices of the examples that central training uses, shape (M,)."""
        if self.search_fraction or self.example_transforms:
            return torch.from_numpy(self.clients.indices).long()
        return self.training.indices

    @property
    def batch_size(self) -> int:
        """Number of examples per batch of a client's local training."""
        size = self._batch_size or self.training.option("batch_size")
        if size is None:
            raise ConfigurationError(
                "the source's loader has no batch_size: set data.batch_size (of FederatedDataModule)"
            )
        return int(size)

    @property
    def full_batch(self) -> int:
        """Number of examples in a full batch: `batch_size`, or fewer if even the largest client has fewer."""
        return max(1, min(self.batch_size, int(self.clients.num_examples.max(initial=1))))

    @cached_property
    def labels(self) -> npt.NDArray[Any]:
        """Label of every training example, shape (N,); one-hot rows become class numbers."""
        return as_labels(read_column(self.train_dataset, self.label_column))

    @cached_property
    def _classes(self) -> npt.NDArray[Any]:
        """Labels by which examples are divided among clients, shape (N,); with ``bins``, each label's quantile bin."""
        return self.labels if self.bins is None else quantile_bins(self.labels, self.bins)

    @cached_property
    def _roles(self) -> Roles:
        if self.label_column is not None:
            _ = self.labels  # a wrong column is refused, also with a partition that reads no labels
        shares = {"validation": self.client_val_fraction, "test": self.client_test_fraction}
        if any(shares.values()):
            check_drawn_once(self.training)
        shards = divide(
            self.training, self.partition, self.num_clients, lambda: self._classes, self.seed
        )
        return Roles.of(shards, **shares, search=self.search_fraction, seed=self.seed)

    # Set for remote clients: function from a stage (``validation`` or ``test``) and clients to the metrics
    # that each client logs on its held-out examples.
    evaluated_by: Callable[[str, list[int]], dict[int, dict[str, Tensor]]] | None = None
    # Set for remote clients: function that returns sums over their training examples, with the arguments
    # of `ClientsAtSites.sums`.
    summed_by: Callable[..., Iterator[Any]] | None = None

    def join_as(self, places: Mapping[int, int], num_clients: int) -> None:
        """Renumber this site's clients as clients of a larger federation, whose other clients have no examples here.

        Args:
            places: number of the local client, by number of the federation's client.
            num_clients: number of clients of the federation.

        Raises:
            ConfigurationError: if there is no such client.
        """
        vars(self)["_roles"] = self._roles.placed(places, num_clients)
        for name in ("_owners", "fingerprint", "update_weights", "train_batch", "evaluation_batch"):
            vars(self).pop(name, None)

    @property
    def clients(self) -> FlatShards:
        """Indices of each client's training examples; in an architecture search, only those that train the weights."""
        return self._roles.train

    @cached_property
    def update_weights(self) -> Integers:
        """Weight of each client's update in the server's mean, shape (num_clients,); 0 only for clients without examples."""
        column = self.update_weight
        if column is None:
            return self.clients.num_examples
        values = read_column(self.train_dataset, column, "data.update_weight")
        return self.clients.sums_of(values, "data.update_weight")

    @property
    def _weights_hash(self) -> str | None:
        """Hash of `update_weights`; None if each client's weight is its number of examples."""
        if self.update_weight is None:
            return None
        return blake2b(self.update_weights.tobytes(), digest_size=16).hexdigest()

    def held_out(self, stage: str) -> FlatShards:
        """Return each client's held-out examples for ``validation`` or ``test``; empty if nothing is held out."""
        return self._roles.test if stage == "test" else self._roles.validation

    @property
    def leakage(self) -> str | None:
        """Text that says why the model may have been trained on held-out examples; None without such a reason."""
        if self._trained_on is None or self._trained_on == self.fingerprint:
            return None
        return (
            "the model was trained on another partition or centrally, perhaps on examples that clients "
            "hold out here (use the num_clients, partition, client_val_fraction, client_test_fraction and "
            "seed of the run that wrote the checkpoint)"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the partition, i.e. of every client's training examples."""
        return partition_fingerprint(self.clients)

    def summary(self) -> PartitionSummary:
        """Return how many training examples, and of which classes, every client has.

        With more than 10,000 clients, classes are counted for 10,000 of them, evenly spaced. No classes
        are counted if labels are missing, vectors, or real numbers without ``bins``.
        """
        try:
            labels = self._classes if are_classes(self._classes) else None
        except ConfigurationError:  # a partition by labels has raised it before
            labels = None
        return PartitionSummary.of(self.clients, labels, max_clients=MAX_CLIENTS_COUNTED)

    @cached_property
    def train_batch(self) -> Read:
        """Function from example indices, shape (B,), to a training batch with all transforms."""
        read = self._reader(self._read(augmented=True))
        if self._poison is not None:
            read = changed_reader(read, *self._poison, "attackers.poison")
        if not self.search_fraction:
            return read
        partner = partners(self._roles.train, self._roles.search)
        return lambda some: {"train": read(some), "search": read(partner[some])}

    @cached_property
    def _owners(self) -> Tensor:
        """Number of the client that owns each example, shape (N,); -1 for examples without a client."""
        roles = self._roles
        return owners_of((roles.learning, roles.validation, roles.test), len(self.training))

    def _read(self, *, augmented: bool) -> Read:
        """Return a function from example indices, shape (B,), to a batch to which `transforms` are not yet applied."""
        read = self.training.reader(augmented=augmented)
        if not self.example_transforms:
            return read
        return changed_reader(
            read,
            self._owners,
            transforms_of(self.example_transforms, self.seed),
            "data.example_transforms",
        )

    def _reader(self, read: Read) -> Read:
        transforms = self.fitted_transforms
        return (lambda indices: on_inputs(transforms, read(indices))) if transforms else read

    def poison(self, clients: Sequence[int], poison: Poison | None, seed: int = 0) -> None:
        """Make the given clients attackers with poisoned training examples, or undo this.

        Args:
            clients: the attackers.
            poison: change of their examples; None to undo it.
            seed: seed of the choice of examples, if not all are changed.

        Raises:
            ConfigurationError: if attackers share an example with others, who would train on it as well.
        """
        self._poison = None
        if poison is not None:
            learning, total = self._roles.learning, len(self.training)
            attackers = poisoned_examples(learning, clients, poison.share, total, seed)
            if len(clients) and are_classes(self._classes):
                batch = self._reader(self._read(augmented=True))(self.clients[clients[0]])
                check_poison(batch, int(self._classes.max()) + 1, poison)
            self._poison = attackers, lambda inputs, labels, *_: poison.change(inputs, labels)
        self.__dict__.pop("train_batch", None)

    @property
    def reads_by_index(self) -> bool:
        """True if batches are rows of tensors in memory, so that equal indices always give equal batches."""
        return self.training.reads_rows and not self.example_transforms

    def held_out_batches(self, client: int, stage: str = "validation") -> Iterator[tuple[Any, int]]:
        """Yield a client's held-out examples as pairs (batch, number of examples), without augmentation if possible."""
        for indices in self.held_out(stage)[client].split(self.batch_size):
            if len(indices):
                yield self.evaluation_batch(indices), len(indices)

    @cached_property
    def evaluation_batch(self) -> Read:
        """Function from example indices, shape (B,), to a batch for evaluation, without augmentation if possible."""
        return self._reader(self._read(augmented=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state, and hashes of the partition and update weights, which a resumed run must keep."""
        is_central = self._trained_on == _CENTRAL
        return {
            "partition": _CENTRAL if is_central else self.fingerprint,
            "update_weights": None if is_central else self._weights_hash,
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the source's state; raise if training resumes with another partition or other weights."""
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        partition = state_dict["partition"]
        if fitting and partition != _CENTRAL:
            if partition != self.fingerprint:
                raise ConfigurationError(
                    f"the checkpoint was trained on another partition ({partition[:12]}… instead of "
                    f"{self.fingerprint[:12]}…): resume with the data set, num_clients, partition, "
                    "client_val_fraction, client_test_fraction and seed of the run that wrote it, or start "
                    "anew without ckpt_path"
                )
            if state_dict.get("update_weights") != self._weights_hash:
                raise ConfigurationError(
                    "the checkpoint was trained with another data.update_weight: resume with the "
                    "update_weight of the run that wrote it, or start anew without ckpt_path"
                )
        self._trained_on = None if fitting else partition
        self.source.load_state_dict(state_dict["source"])
