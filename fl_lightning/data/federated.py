"""Any LightningDataModule, and whose examples are whose.

`FederatedDataModule` wraps a data module without changing it: validation, test and prediction
loaders are the source's own; only its training set is divided among clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator, run_seed
from fl_lightning.data.inputs import InputTransform, Transform, on_inputs
from fl_lightning.data.partition import IID, Partition
from fl_lightning.data.poisoning import Poison, poisoned_examples, poisoned_reader
from fl_lightning.data.reading import evaluation_reader, loader_option
from fl_lightning.data.shards import (
    BatchedDataset,
    ClientShards,
    batch_reader,
    read_column,
    reads_by_index,
)
from fl_lightning.data.summary import PartitionSummary, partition_fingerprint

MAX_CLIENTS_COUNTED = 10_000  # by `FederatedDataModule.summary`, class by class
MAX_EXAMPLES_READ = 1024  # at a time, for statistics

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


class FederatedDataModule(LightningDataModule):
    """A data module whose training set is divided among clients.

    Without a `Federation` it trains centrally on its source's own training loader.

    Args:
        source: any data module whose ``train_dataloader`` is one `DataLoader` over a map-style
            data set. Its batch size, ``drop_last``, collate function and evaluation loaders are
            used; its sampler is not, because every client shuffles its own shard.
        num_clients: how many clients; may be left out where the partition knows (natural ids).
        partition: the rule that divides the examples, `IID` if None.
        batch_size: examples per local batch; the source's own if None.
        client_val_fraction: share of every client's examples, in [0, 1), that it never trains on
            and that per-client validation uses.
        client_test_fraction: the same for per-client tests: further examples, in neither of the other
            two parts.
        transforms: what is done to the inputs of every batch, in training and in evaluation, e.g.
            `FederatedNormalize`; in a central run as well.
        labels: the data set's attribute that holds one label per example; found by itself for
            torchvision's and tensor data sets.
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
        transforms: list[InputTransform] | None = None,
        labels: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check(num_clients, batch_size)
        _check_fractions(client_val_fraction, client_test_fraction)
        self.source = source
        self.num_clients = num_clients
        self.partition = partition if partition is not None else IID()
        self.client_val_fraction = client_val_fraction
        self.client_test_fraction = client_test_fraction
        self.transforms = list(transforms or [])
        self.label_attribute = labels
        self.seed = run_seed(seed)
        self.prepare_data_per_node = source.prepare_data_per_node
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

        def transformed() -> Any:
            return self._transformed(method())

        return transformed

    def _transformed(self, loaders: Any) -> Any:
        """Return loaders whose batches went through the transforms."""
        if not self.transforms:
            return loaders
        if isinstance(loaders, (list, tuple)):
            return [self._transformed(loader) for loader in loaders]
        if not isinstance(loaders, DataLoader):
            raise ConfigurationError(
                f"data.transforms need loaders of the type DataLoader, got {type(loaders).__name__}"
            )
        loader, collate = copy.copy(loaders), loaders.collate_fn
        loader.collate_fn = lambda examples: on_inputs(self.fitted_transforms, collate(examples))
        return loader

    @cached_property
    def fitted_transforms(self) -> list[Transform]:
        """The transforms as functions of inputs; what they learn, they learn from all clients."""
        fitted: list[Transform] = []
        read = evaluation_reader(self._loader)

        def inputs_of(client: Tensor) -> Iterator[Tensor]:
            for indices in client.split(MAX_EXAMPLES_READ):
                if len(indices):
                    batch = on_inputs(fitted, read(indices))
                    yield batch if isinstance(batch, Tensor) else batch[0]

        for transform in self.transforms:
            done = transform.fit(lambda: map(inputs_of, self.clients))
            fitted = [*fitted, done]
        return fitted

    def prepare_data(self) -> None:
        """Let the source download or check its files."""
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Let the source load; the partition itself is drawn when it is first asked for."""
        self.source.trainer = self.trainer
        self.source.setup(stage)
        self._is_set_up = self._is_set_up or stage == "fit"

    def teardown(self, stage: str) -> None:
        """Let the source clean up."""
        self.source.teardown(stage)

    def train_dataloader(self) -> Any:
        """Return the rounds' client groups in a federation, else the source's own loader."""
        if self._rounds is not None:
            return self._rounds
        return self._transformed(self.source.train_dataloader())

    def train_in_rounds(self, rounds: Any) -> None:
        """Have `train_dataloader` return these groups of clients; None for central training."""
        self._rounds = rounds
        self._trained_partition = None

    @property
    def trains_in_rounds(self) -> bool:
        """Whether `train_dataloader` returns groups of clients."""
        return self._rounds is not None

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        if not self._is_set_up:  # once only: a source may split at random
            self.setup("fit")
        loader = self.source.train_dataloader()
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                f"{type(self.source).__name__}.train_dataloader() must return one DataLoader over "
                f"a map-style data set (with __len__ and __getitem__), got {type(loader).__name__}"
                ": its examples are divided among the clients by index"
            )
        return loader

    @property
    def train_dataset(self) -> Dataset[Any]:
        """The data set whose examples the clients own."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Examples per local batch."""
        size = self._batch_size or loader_option(self._loader, "batch_size")
        if size is None:
            raise ConfigurationError(
                "the source's loader does not tell its batch size: "
                "give FederatedDataModule a batch_size"
            )
        return int(size)

    @property
    def drop_last(self) -> bool:
        """Whether the source's loader leaves out a smaller last batch; then clients do as well."""
        return bool(loader_option(self._loader, "drop_last"))

    @cached_property
    def labels(self) -> npt.NDArray[Any]:
        """One label per training example, shape (N,)."""
        return read_column(self.train_dataset, self.label_attribute)

    @cached_property
    def _split(self) -> tuple[ClientShards, ClientShards, ClientShards]:
        attribute = getattr(self.partition, "attribute", None)
        num_clients = self.num_clients
        if attribute is not None:
            column = read_column(self.train_dataset, attribute)
            num_clients = num_clients or len(np.unique(column))
        elif getattr(self.partition, "uses_labels", True):
            column = self.labels
        else:
            column = np.zeros(len(self.train_dataset), np.int8)  # type: ignore[arg-type]
        if num_clients is None:
            raise ConfigurationError(
                f"FederatedDataModule needs num_clients with {type(self.partition).__name__}"
            )
        shards = ClientShards(self.partition.assign(column, num_clients, self.seed))
        self._check_range(shards)
        generator = numpy_generator(self.seed, "client validation")
        rest, validation = shards.hold_out(self.client_val_fraction, generator)
        generator = numpy_generator(self.seed, "client test")
        share_of_rest = self.client_test_fraction / (1 - self.client_val_fraction)
        return *rest.hold_out(share_of_rest, generator), validation

    def _check_range(self, shards: ClientShards) -> None:
        total: int = len(self.train_dataset)  # type: ignore[arg-type]
        last = int(shards.flat.indices.max(initial=-1))
        if last >= total:
            raise ConfigurationError(
                f"{type(self.partition).__name__}.assign must return indices below the number of "
                f"training examples, {total}, got {last}"
            )

    @property
    def clients(self) -> ClientShards:
        """What each client trains on."""
        return self._split[0]

    @property
    def held_out(self) -> ClientShards:
        """What each client is validated on; empty shards if ``client_val_fraction`` is 0."""
        return self._split[2]

    def held_out_for(self, stage: str) -> ClientShards:
        """Return what each client is evaluated on in ``validation`` or ``test``."""
        return self._split[1] if stage == "test" else self.held_out

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

        Of more than 10,000 clients the classes of 10,000, evenly spaced, are counted. Examples whose
        labels are no classes (none, vectors, real numbers) count as of one class.
        """
        try:
            labels = self.labels
        except ConfigurationError:
            labels = np.empty(0)
        if labels.ndim != 1 or labels.dtype.kind not in "iubUS":
            labels = np.zeros(len(self.train_dataset), np.int64)  # type: ignore[arg-type]
        return PartitionSummary.of(self.clients.flat, labels, max_clients=MAX_CLIENTS_COUNTED)

    @cached_property
    def train_batch(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to a training batch."""
        read = self._reader(batch_reader(self.train_dataset, self._loader.collate_fn))
        if self._poison is None:
            return read
        clients, poison, seed = self._poison
        total: int = len(self.train_dataset)  # type: ignore[arg-type]
        chosen = poisoned_examples(self.clients, clients, poison.share, total, seed)
        return poisoned_reader(read, chosen, poison)

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
        flat = self.clients.flat
        is_changed = np.repeat(np.isin(np.arange(len(flat)), list(clients)), flat.sizes)
        shared = np.intersect1d(flat.indices[is_changed], flat.indices[~is_changed])
        if len(shared):
            raise ConfigurationError(
                f"attackers: example {shared[0]} is in shards of attackers and of others, who would "
                "train on what the former make of it: use a partition whose shards do not overlap"
            )
        self._poison = None if poison is None else (list(clients), poison, seed)
        self.__dict__.pop("train_batch", None)

    @property
    def reads_by_index(self) -> bool:
        """Whether a batch is a plain selection of rows in memory, the same at every reading."""
        return reads_by_index(self.train_dataset, self._loader.collate_fn)

    @property
    def has_own_collate(self) -> bool:
        """Whether batches are made of examples by a function of the source's own."""
        custom = self._loader.collate_fn is not default_collate
        return custom and not isinstance(self.train_dataset, BatchedDataset)

    def held_out_batches(self, client: int, stage: str = "validation") -> Iterator[tuple[Any, int]]:
        """Yield (batch, size) over a client's held-out examples, without augmentation if known."""
        for indices in self.held_out_for(stage)[client].split(self.batch_size):
            if len(indices):
                yield self.evaluation_batch(indices), len(indices)

    @cached_property
    def evaluation_batch(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to a batch without augmentation, if known."""
        return self._reader(evaluation_reader(self._loader))

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


def _check(num_clients: int | None, batch_size: int | None) -> None:
    if num_clients is not None and num_clients < 1:
        raise ConfigurationError(f"num_clients must be at least 1, got {num_clients}")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1 example, got {batch_size}")


def _check_fractions(validation: float, test: float) -> None:
    for name, fraction in (("client_val_fraction", validation), ("client_test_fraction", test)):
        if not 0 <= fraction < 1:
            raise ConfigurationError(
                f"{name} must be in [0, 1), got {fraction}: "
                "it is the share of its examples that a client never trains on"
            )
    if validation + test >= 1:
        raise ConfigurationError(
            f"client_val_fraction and client_test_fraction must be below 1 together, got "
            f"{validation} and {test}: clients train on the rest"
        )
