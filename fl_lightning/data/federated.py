"""Any LightningDataModule, and whose examples are whose.

`FederatedDataModule` wraps a data module without changing it: validation, test and prediction
loaders are the source's own; only its training set is divided among clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.kinds import check_kinds
from fl_lightning.core.seeds import run_seed
from fl_lightning.data.client_examples import ExampleTransform, owners_of
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
from fl_lightning.data.poisoning import (
    Poison,
    check_apart,
    check_poison,
    poisoned_examples,
    poisoned_reader,
)
from fl_lightning.data.roles import Roles, SearchHalf, check_fractions, divide
from fl_lightning.data.shards import ClientShards
from fl_lightning.data.summary import PartitionSummary, partition_fingerprint
from fl_lightning.data.training_set import TrainingSet

MAX_CLIENTS_COUNTED = 10_000  # by `FederatedDataModule.summary`, class by class

# What a source may define and Lightning looks for on the data module: handed through if it does.
_HANDED_THROUGH = (
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_exception",
)


class FederatedDataModule(ForwardingDataModule):
    """A data module whose training set is divided among clients.

    Without a `Federation` it trains centrally on its source's own training loader. What it does not
    have itself, e.g. ``num_classes`` or hyperparameters, is the source's.

    Args:
        source: any data module whose ``train_dataloader`` is one `DataLoader` over a map-style data
            set. Its batch size, ``drop_last``, collate function and evaluation loaders are used.
            Every client shuffles its own examples. Examples that a sampler leaves out belong to no
            client; a `WeightedRandomSampler` weighs inside each client; other samplers are refused.
        num_clients: how many clients; not needed where the partition knows (natural ids).
        partition: the rule that divides the examples, `IID` if None.
        batch_size: examples per local batch; the source's own if None.
        client_val_fraction: share of every client's examples, in [0, 1), on which the client is
            validated; it never trains on them.
        client_test_fraction: share of every client's examples, in [0, 1), on which the client is
            tested; they are in neither of the other two parts.
        search_fraction: for a search over architectures: share of what each client trains on, in
            (0, 0.5], that its weights do not learn from and its choices do; 0 for none. Batches
            then hold both, see `SearchHalf`, in a central run as well.
        transforms: change the inputs of every batch, in training and in evaluation, e.g.
            `FederatedNormalize`; in a central run as well.
        example_transforms: change every example of a client, its label included, before
            ``transforms``, each client's in its own way, e.g. `QuarterTurns`. Partitions use the
            labels before the change. A central run pools what clients train on.
        labels: one label per example: the name of an attribute of the data set, of a column (as in
            data sets of Hugging Face), or of a key of its items; or a function of the data set, or its
            import path; or a list of them, in Python also an array or tensor. Strings and one-hot rows are fine.
            If None, what is called targets, labels, y, target or label, a tensor data set's last
            tensor, or every item's second part.
        bins: a number of quantiles, ≥ 2. Partitions by class then divide by the quantiles of the
            labels, for targets that are real numbers or many whole ones.
        ignore_sampler: every client shuffles all of its examples, whatever the source's sampler or
            batch sampler draws in a central run.
        seed: of partition and hold-out; the run's seed if None.

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
        ignore_sampler: bool = False,
        seed: int | None = None,
    ) -> None:
        check_kinds(FederatedDataModule.__init__, locals())
        super().__init__(source)
        _check(num_clients, batch_size, bins)
        check_fractions(client_val_fraction, client_test_fraction, search_fraction)
        self.num_clients = num_clients
        self.partition = partition if partition is not None else IID()
        self.client_val_fraction = client_val_fraction
        self.client_test_fraction = client_test_fraction
        self.search_fraction = search_fraction
        self.transforms = list(transforms or [])
        self.example_transforms = list(example_transforms or [])
        self.label_column, self.bins, self.ignore_sampler = labels, bins, ignore_sampler
        self.seed = run_seed(seed)
        self._batch_size = batch_size
        self._rounds: Any = None
        self._poison: tuple[list[int], Poison, int] | None = None
        self._trained_partition: str | None = None  # of a checkpoint that is evaluated
        self._is_set_up = False
        for name in _HANDED_THROUGH:
            if is_overridden(name, source, LightningDataModule):
                setattr(self, name, self._handed_through(name))

    def _handed_through(self, name: str) -> Any:
        """Return a method of the source; one that makes loaders with the transforms on top."""
        method = getattr(self.source, name)
        if not self.transforms or not name.endswith("_dataloader"):
            return method
        return lambda: self._transformed(method())

    def _transformed(self, loaders: Any) -> Any:
        """Return loaders whose batches went through the transforms."""
        return (
            with_transforms(loaders, lambda: self.fitted_transforms) if self.transforms else loaders
        )

    @cached_property
    def fitted_transforms(self) -> list[Transform]:
        """The transforms as functions of inputs; what they learn, they learn from all clients."""
        return fit_transforms(self.transforms, self.clients, self._read(augmented=False))

    def setup(self, stage: str) -> None:
        """Let the source load; the partition itself is drawn when it is first asked for."""
        super().setup(stage)
        self._is_set_up = self._is_set_up or stage == "fit"

    def train_dataloader(self) -> Any:
        """Return the rounds' client groups in a federation, else the loader of a central run."""
        if self._rounds is not None:
            return self._rounds
        if self.search_fraction or self.example_transforms:
            return self._pooled_loader()
        return self._transformed(self.source.train_dataloader())

    def _pooled_loader(self) -> DataLoader[Any]:
        """Return a central run's loader over all clients' examples as clients read them."""
        examples = torch.from_numpy(self.clients.flat.indices)
        places: Any = range(len(examples))
        weights = self.weights_of(examples)
        sampler: Sampler[int] = RandomSampler(places)
        if weights is not None:
            sampler = WeightedRandomSampler(weights.tolist(), len(examples))
        elif isinstance(self.source.train_dataloader().sampler, SequentialSampler):
            sampler = SequentialSampler(places)
        return DataLoader(
            places,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=self.drop_last,
            collate_fn=lambda some: self.train_batch(examples[some]),
        )

    def train_in_rounds(self, rounds: Any) -> None:
        """Have `train_dataloader` return these groups of clients; None for central training."""
        self._rounds = rounds
        self._trained_partition = None

    @property
    def trains_in_rounds(self) -> bool:
        """Whether `train_dataloader` returns groups of clients."""
        return self._rounds is not None

    @cached_property
    def _examples(self) -> TrainingSet:
        if not self._is_set_up:  # once only: a source may split at random
            self.setup("fit")
        loader, name = self.source.train_dataloader(), type(self.source).__name__
        return TrainingSet(loader, name, ignore_sampler=self.ignore_sampler)

    @property
    def train_dataset(self) -> Dataset[Any]:
        """The data set whose examples the clients own."""
        return self._examples.dataset

    @property
    def train_indices(self) -> Tensor:
        """The examples that are divided among the clients, shape (M,)."""
        return self._examples.indices

    @property
    def batch_size(self) -> int:
        """Examples per local batch."""
        size = self._batch_size or self._examples.batch_size
        if size is None:
            raise ConfigurationError(
                "the source's loader does not tell its batch size: "
                "give FederatedDataModule a batch_size"
            )
        return size

    @property
    def full_batch(self) -> int:
        """Examples of a full local batch: no more than the largest client has."""
        return max(1, min(self.batch_size, int(self.clients.num_examples.max(initial=1))))

    @property
    def drop_last(self) -> bool:
        """Whether the source's loader leaves out a smaller last batch; then clients do as well.

        A client with less than a batch keeps it: it would not train at all otherwise.
        """
        return self._examples.drop_last

    @property
    def draws_by_weight(self) -> bool:
        """Whether clients draw with replacement, by the weights of the source's sampler."""
        return self._examples.drawn.weights is not None

    def weights_of(self, examples: Tensor) -> Tensor | None:
        """Return how likely examples are to be drawn, shape (n,); None if each is, once a pass."""
        weights = self._examples.drawn.weights
        return None if weights is None else weights.index_select(0, examples)

    @cached_property
    def labels(self) -> npt.NDArray[Any]:
        """One label per example of the data set, shape (N,); of one-hot rows the place of the 1."""
        return as_labels(read_column(self.train_dataset, self.label_column))

    @cached_property
    def _classes(self) -> npt.NDArray[Any]:
        """What partitions divide by: the labels, or their bins."""
        return self.labels if self.bins is None else quantile_bins(self.labels, self.bins)

    @cached_property
    def _roles(self) -> Roles:
        shards = ClientShards(
            divide(
                self._examples, self.partition, self.num_clients, lambda: self._classes, self.seed
            )
        )
        validation, test = self.client_val_fraction, self.client_test_fraction
        return Roles.of(
            shards,
            validation=validation,
            test=test,
            search=self.search_fraction,
            seed=self.seed,
        )

    # Where clients' examples are elsewhere: returns what they log on those that they hold out for a
    # stage, ``validation`` or ``test``, by client. Set by whoever has them evaluated there.
    evaluated_by: Callable[[str, list[int]], dict[int, dict[str, Tensor]]] | None = None

    def join_as(self, places: Mapping[int, int], num_clients: int) -> None:
        """Have clients here be some of a larger federation, whose others have nothing here.

        Args:
            places: by client of the federation, which client here it is.
            num_clients: of the federation.

        Raises:
            ConfigurationError: if there is no such client.
        """
        here = len(self.clients)
        for client, place in places.items():
            if not (0 <= client < num_clients and 0 <= place < here):
                raise ConfigurationError(
                    f"site.yaml, clients: {client}: {place} must name one of the federation's "
                    f"{num_clients} clients and one of the {here} of this site's data"
                )
        vars(self)["_roles"] = self._roles.placed(places, num_clients)
        vars(self).pop("_owners", None)

    @property
    def clients(self) -> ClientShards:
        """What each client trains on; in a search, what its weights learn from."""
        return self._roles.train

    @property
    def held_out(self) -> ClientShards:
        """What each client is validated on; empty shards if ``client_val_fraction`` is 0."""
        return self._roles.validation

    def held_out_for(self, stage: str) -> ClientShards:
        """Return what each client is evaluated on in ``validation`` or ``test``."""
        return self._roles.test if stage == "test" else self._roles.validation

    @property
    def is_foreign_checkpoint(self) -> bool:
        """Whether what is evaluated was trained on another partition, held-out examples perhaps."""
        return self._trained_partition not in (None, self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the partition: of every client's training examples."""
        return partition_fingerprint(self.clients.flat)

    def summary(self) -> PartitionSummary:
        """Return sizes and classes of every client's training examples.

        Of more than 10,000 clients the classes of 10,000, evenly spaced, are counted. Where labels are
        no classes (none, vectors, real numbers without ``bins``), none are.
        """
        try:
            labels = self._classes if are_classes(self._classes) else None
        except ConfigurationError:  # which a partition that looks at labels has raised before
            labels = None
        return PartitionSummary.of(self.clients.flat, labels, max_clients=MAX_CLIENTS_COUNTED)

    @cached_property
    def train_batch(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to a training batch."""
        read = self._reader(self._read(augmented=True))
        if self._poison is not None:
            read = self._poisoned(read)
        return (
            SearchHalf(self._roles.train, self._roles.search).paired(read)
            if self.search_fraction
            else read
        )

    def _poisoned(self, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        assert self._poison is not None
        clients, poison, seed = self._poison
        total = len(self._examples)
        chosen = poisoned_examples(self._roles.learning, clients, poison.share, total, seed)
        return poisoned_reader(read, chosen, poison)

    @cached_property
    def _owners(self) -> npt.NDArray[np.int64]:
        """The client of each example, shape (N,); -1 for nobody."""
        roles = self._roles
        shards = (roles.learning.flat, roles.validation.flat, roles.test.flat)
        return owners_of(shards, len(self._examples))

    def _read(self, *, augmented: bool) -> Callable[[Tensor], Any]:
        """Return the function from indices, shape (B,), to a batch before `transforms`."""
        examples, own = self._examples, self.example_transforms
        if own:
            return examples.changed(own, lambda: self._owners, self.seed, augmented=augmented)
        return examples.read if augmented else examples.read_for_evaluation

    def _reader(self, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        transforms = self.fitted_transforms
        return (lambda indices: on_inputs(transforms, read(indices))) if transforms else read

    def poison(self, clients: Sequence[int], poison: Poison | None, seed: int = 0) -> None:
        """Have some clients train on changed examples; None for what is theirs.

        Args:
            clients: whose.
            poison: what becomes of them.
            seed: of which examples, where it is not all.

        Raises:
            ConfigurationError: if they share an example with others, who would train on it as well.
        """
        check_apart(self._roles.learning, clients)
        if poison is not None and len(clients) and are_classes(self._classes):
            batch = self._reader(self._read(augmented=True))(self.clients[clients[0]])
            check_poison(batch, self._classes, poison)
        self._poison = None if poison is None else (list(clients), poison, seed)
        self.__dict__.pop("train_batch", None)

    @property
    def reads_by_index(self) -> bool:
        """Whether a batch is a plain selection of rows in memory, the same at every reading."""
        return self._examples.reads_by_index and not self.example_transforms

    @property
    def has_own_collate(self) -> bool:
        """Whether batches are made of examples by a function of the source's own."""
        return self._examples.has_own_collate

    def held_out_batches(self, client: int, stage: str = "validation") -> Iterator[tuple[Any, int]]:
        """Yield (batch, size) over a client's held-out examples, without augmentation if known."""
        for indices in self.held_out_for(stage)[client].split(self.batch_size):
            if len(indices):
                yield self.evaluation_batch(indices), len(indices)

    @cached_property
    def evaluation_batch(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to a batch without augmentation, if known."""
        return self._reader(self._read(augmented=False))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged."""
        return {"partition": self.fingerprint, "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to go on training with another partition than the checkpoint's."""
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        if fitting and state_dict["partition"] != self.fingerprint:
            raise ConfigurationError(
                "the checkpoint was trained on another partition "
                f"({state_dict['partition'][:12]}… instead of {self.fingerprint[:12]}…): resume "
                "with the data set, num_clients, partition, client_val_fraction, "
                "client_test_fraction and seed of the run that wrote it, or start anew without "
                "ckpt_path"
            )
        self._trained_partition = None if fitting else state_dict["partition"]
        self.source.load_state_dict(state_dict["source"])


def _check(num_clients: int | None, batch_size: int | None, bins: int | None) -> None:
    if bins is not None and bins < 2:
        raise ConfigurationError(f"bins must be at least 2, got {bins}: null divides by the labels")
    if num_clients is not None and num_clients < 1:
        raise ConfigurationError(f"num_clients must be at least 1, got {num_clients}")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1 example, got {batch_size}")
