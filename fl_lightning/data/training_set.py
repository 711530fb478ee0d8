"""The data set behind a training loader: the examples that a pass draws, and a reader of batches.

The loader's sampler draws           clients draw
    all examples, in any order         all of their own, shuffled
    some examples                      these examples alone, which are divided among the clients
    examples by weight                 their own examples by weight, with replacement:
                                       p_i = w_i / Σ_(j of the client) w_j

Other samplers are rejected, because clients cannot reproduce them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import sent

Read = Callable[[Tensor], Any]  # from indices of examples, shape (B,), to a batch
# samplers that draw one example at a time
_SINGLE = SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler


class Drawn(NamedTuple):
    """Examples that one pass over a DataLoader draws from its N examples, and their sampling weights.

    Attributes:
        indices: indices of the examples, shape (M,); None for all.
        weights: weights of all examples for draws with replacement, float64 of shape (N,); None if a
            pass draws each example once.
    """

    indices: Tensor | None = None
    weights: Tensor | None = None


class TrainingSet:
    """A training loader's data set, which reads batches by index and knows which examples a pass draws.

    Args:
        loader: a `DataLoader` over a map-style data set.
        source: name of the data module, for errors.
        ignore_sampler: whether to ignore the sampler, so that a pass draws all examples.

    Attributes:
        dataset: the data set.

    Example:
        >>> loader = DataLoader([4.0, 5.0, 6.0], batch_size=2, sampler=SubsetRandomSampler([2, 0]))
        >>> training = TrainingSet(loader, "Digits")
        >>> training.drawn, training.option("batch_size"), len(training)
        (Drawn(indices=tensor([2, 0]), weights=None), 2, 3)
        >>> training.reader()(torch.tensor([2, 0]))
        tensor([6., 4.], dtype=torch.float64)
    """

    def __init__(
        self, loader: DataLoader[Any], source: str = "source", *, ignore_sampler: bool = False
    ) -> None:
        self.dataset: Dataset[Any] = loader.dataset
        self._loader = loader
        self._source, self._ignores_sampler = source, ignore_sampler

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def option(self, name: str) -> Any:
        """Return an option of the DataLoader or of its sampler, e.g. ``batch_size``; None if it is not set."""
        # a loader with a batch sampler, or one over whole batches, has the option there
        places = (self._loader, self._loader.batch_sampler, self._loader.sampler)
        return next((value for place in places if (value := getattr(place, name, None))), None)

    @cached_property
    def drawn(self) -> Drawn:
        """Examples that one pass over the training loader draws, and their sampling weights.

        Raises:
            ConfigurationError: if clients cannot reproduce the sampler.
        """
        return Drawn() if self._ignores_sampler else _drawn(self._loader, self._source)

    @property
    def indices(self) -> Tensor:
        """Indices of the examples that one pass over the training loader draws, shape (M,)."""
        drawn = self.drawn.indices
        return torch.arange(len(self)) if drawn is None else drawn

    @property
    def has_own_collate(self) -> bool:
        """True if the loader has a collate function of the user's, not PyTorch's default."""
        collate = self._loader.collate_fn
        return collate is not default_collate and not _gathers(self.dataset, collate)

    @property
    def reads_rows(self) -> bool:
        """True if batches are rows of tensors in memory, so that equal indices always give equal batches.

        This holds for tensor data sets, and for data sets with ``gather`` and a true ``is_deterministic``.
        """
        dataset: Any = self.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if _gathers(dataset, self._loader.collate_fn):
            return bool(getattr(dataset, "is_deterministic", False))
        return type(dataset) is TensorDataset and self._loader.collate_fn is default_collate

    def pooled(self, examples: Tensor, batch_size: int, read: Read) -> DataLoader[Any]:
        """Return a DataLoader for central training on given examples, with a sampler like the source's.

        Args:
            examples: indices of the examples, shape (M,).
            batch_size: examples per batch.
            read: function from indices to a batch.
        """
        places: Any = range(len(examples))
        sampler: Sampler[int] = RandomSampler(places)
        if self.drawn.weights is not None:
            sampler = WeightedRandomSampler(self.drawn.weights[examples].tolist(), len(examples))
        elif isinstance(self._loader.sampler, SequentialSampler):
            sampler = SequentialSampler(places)
        drop_last, collate = bool(self.option("drop_last")), lambda some: read(examples[some])
        return DataLoader(
            places, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate
        )

    def reader(self, *, augmented: bool = False) -> Read:
        """Return a function from example indices, shape (B,), to a batch as the training loader makes it.

        Args:
            augmented: whether examples are augmented; if not, the batches are those of the data set that
                the data set's method ``evaluation`` returns, if it has one.
        """
        dataset = self.dataset if augmented else _without_augmentation(self.dataset)
        # a loader without a batch sampler passes on what its sampler draws, here whole lists of indices
        at_once = self._loader.batch_sampler is None
        return batch_reader(dataset, self._loader.collate_fn, at_once=at_once)


def check_loader(loader: Any, method: str) -> None:
    """Raise ConfigurationError if a training loader's examples cannot be divided among clients by index."""
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) and not isinstance(loader, Dataset):
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set, got several "
            f"({type(loader).__name__}): a client draws from one. Join their data sets, e.g. in a "
            "ConcatDataset, or in a data set whose items have an example of each"
        )
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_map:
        found = type(loader if dataset is None else dataset).__name__
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set (with __len__ and "
            f"__getitem__), got {found}: its examples are divided among the clients by index"
        )
    if loader.batch_sampler is None and isinstance(loader.sampler, _SINGLE):
        raise ConfigurationError(
            f"{method} has batch_size=None: the items of its data set are batches, which cannot be divided "
            "among clients. Return a DataLoader with a batch_size over single examples"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"{method} returns a {type(loader).__name__} with an __iter__ of its own, which clients do not "
            "use: return a DataLoader, and move the code of __iter__ to collate_fn or on_after_batch_transfer"
        )


# Batches.


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that returns whole batches, which is many times faster than example by example."""

    def gather(self, indices: Tensor) -> Any:
        """Return the batch of the examples at ``indices``, int64 of shape (B,)."""


def batch_reader(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Any] = default_collate,
    *,
    at_once: bool = False,
) -> Read:
    """Return a function from example indices, shape (B,), to a batch of a map-style data set.

    The batch equals that of a DataLoader without workers. A tensor data set (also on an accelerator) or a
    data set with a ``gather`` method is indexed once per batch, unless the collate function is the user's.

    Args:
        dataset: map-style data set.
        collate: makes a batch from a list of examples.
        at_once: whether to index the data set with a list of indices, and to convert the result by
            ``collate``, like a DataLoader with ``batch_size=None`` and a sampler of batches.

    Example:
        >>> data = TensorDataset(torch.arange(4.0), torch.tensor([0, 1, 0, 1]))
        >>> batch_reader(data)(torch.tensor([2, 3]))
        [tensor([2., 3.]), tensor([0, 1])]
    """
    if _gathers(dataset, collate):
        return dataset.gather  # type: ignore[attr-defined, no-any-return]
    if type(dataset) is TensorDataset and collate is default_collate and not at_once:
        tensors = dataset.tensors
        # several times as fast as tensor[indices]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return lambda indices: [t.index_select(0, indices) for t in tensors]
        return lambda indices: [t.index_select(0, sent(indices, t.device)) for t in tensors]
    if type(dataset) is Subset:
        inner = batch_reader(dataset.dataset, collate, at_once=at_once)
        places = torch.as_tensor(dataset.indices)
        return lambda indices: inner(places.index_select(0, indices))
    if at_once:
        return lambda indices: collate(dataset[indices.tolist()])
    if fetch := getattr(dataset, "__getitems__", None):
        return lambda indices: collate(fetch(indices.tolist()))
    return lambda indices: collate([dataset[index] for index in indices.tolist()])


def _gathers(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    return isinstance(dataset, BatchedDataset) and collate in (default_collate, default_convert)


def _without_augmentation(dataset: Dataset[Any]) -> Dataset[Any]:
    if type(dataset) is Subset:
        return Subset(_without_augmentation(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([_without_augmentation(part) for part in dataset.datasets])
    evaluation = getattr(dataset, "evaluation", None)
    return evaluation() if callable(evaluation) else dataset


# Samplers.

_WAY_OUT = "or set data.ignore_sampler to true, so that every client shuffles all of its examples"


def _drawn(loader: DataLoader[Any], source: str) -> Drawn:
    """Return the examples that a loader's sampler draws; raise if clients cannot reproduce this sampler."""
    count = len(loader.dataset)  # type: ignore[arg-type]
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if not isinstance(sampler, BatchSampler) or not _iterates_as(sampler, BatchSampler):
        _refuse(source, f"{type(sampler).__name__} as batch sampler")
    sampler = sampler.sampler
    kind = next((kind for kind in _SINGLE if _iterates_as(sampler, kind)), None)
    if kind is WeightedRandomSampler:
        return _by_weight(sampler, count, source)
    if kind is RandomSampler:
        known = len(sampler.data_source)
        _check_length(sampler, {known}, source)
        drawn = _some(range(known), count, source)
        weights = torch.ones(count, dtype=torch.float64) if sampler.replacement else None
        return drawn._replace(weights=weights)
    if kind is SequentialSampler:
        return _some(range(len(sampler.data_source)), count, source)
    if kind is SubsetRandomSampler:
        return _some(sampler.indices, count, source)
    if isinstance(sampler, (Sequence, np.ndarray, Tensor)):
        return _some(sampler, count, source)
    return _refuse(source, type(sampler).__name__)


def _iterates_as(sampler: Any, kind: type) -> bool:
    # a subclass may override the draw
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _by_weight(sampler: WeightedRandomSampler, count: int, source: str) -> Drawn:
    given = torch.as_tensor(sampler.weights, dtype=torch.float64).cpu()
    if len(given) > count:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its WeightedRandomSampler has {len(given)} weights for "
            f"{count} examples: give one weight for each example"
        )
    weights = torch.zeros(count, dtype=torch.float64)
    weights[: len(given)] = given
    possible = weights.nonzero().flatten()
    if not sampler.replacement:
        _refuse(source, "WeightedRandomSampler with replacement=False")
    _check_length(sampler, {count, len(given), len(possible)}, source)
    return Drawn(None if len(possible) == count else possible, weights)


def _check_length(sampler: Any, usual: set[int], source: str) -> None:
    if sampler.num_samples not in usual:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its {type(sampler).__name__} has num_samples="
            f"{sampler.num_samples} for {max(usual)} examples, but a client's sampler draws as many examples as the "
            "client has: set num_samples to the number of examples, and the amount of training by "
            f"federation.local_steps or local_epochs; {_WAY_OUT}"
        )


def _some(indices: Any, count: int, source: str) -> Drawn:
    if isinstance(indices, range) and indices == range(count):
        return Drawn()
    try:
        chosen = torch.as_tensor(np.asarray(indices)).long().flatten()
    except (TypeError, ValueError):
        _refuse(source, f"a sampler of {type(indices[0]).__name__}")
    low, high = (int(f(chosen)) if len(chosen) else 0 for f in (torch.min, torch.max))
    if low < 0 or high >= count:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its sampler draws example {low if low < 0 else high}, but "
            f"the data set has examples 0 to {count - 1}"
        )
    is_everything = len(chosen) == count and len(chosen.unique()) == count
    return Drawn() if is_everything else Drawn(chosen)


def _refuse(source: str, name: str) -> NoReturn:
    raise ConfigurationError(
        f"{source}.train_dataloader() draws its examples by {name}, which clients cannot reproduce: each "
        "draws batches of its own examples. Use a SequentialSampler, RandomSampler, SubsetRandomSampler "
        f"or WeightedRandomSampler (with replacement) and a batch_size; {_WAY_OUT}"
    )
