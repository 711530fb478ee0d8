"""A source's training examples: what its loader says about them, as far as clients can do the same.

What a loader's sampler draws, as far as clients that draw for themselves can do the same.

    all examples, in order or shuffled     every client shuffles its own
    some examples                          they alone are divided among the clients
    examples by weight                     every client draws by the weights of its own:
                                           p_i = w_i / Σ_(j of the client) w_j, with replacement

Anything else is refused by name: it would be dropped without a word otherwise.

Training examples as an evaluation sees them: by index, and without augmentation where known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
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
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.client_examples import ExampleTransform, changed_reader
from fl_lightning.data.shards import batch_reader, gathers, reads_by_index

# samplers of one example at a time
_SINGLE = SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler


class TrainingSet:
    """The examples behind a training loader, by index.

    Args:
        loader: what a data module's ``train_dataloader`` returned.
        source: the data module's name, for errors.
        ignore_sampler: take all examples, once each, whatever the loader's sampler draws.

    Raises:
        ConfigurationError: if it is not one loader over a map-style data set, or draws in a way that
            clients cannot follow.

    Attributes:
        dataset: map-style, of N examples.
        drawn: which of them, and by which weights.

    Example:
        >>> examples = TrainingSet(DataLoader(range(10), batch_size=4), "Digits")
        >>> len(examples), examples.batch_size, examples.read(torch.tensor([7, 2]))
        (10, 4, tensor([7, 2]))
    """

    def __init__(self, loader: Any, source: str, *, ignore_sampler: bool = False) -> None:
        _check_loader(loader, f"{source}.train_dataloader()")
        self._loader: DataLoader[Any] = loader
        self.dataset: Dataset[Any] = loader.dataset
        self.drawn = Drawn() if ignore_sampler else drawn_examples(loader, source)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @cached_property
    def indices(self) -> Tensor:
        """The examples that are drawn, shape (M,)."""
        chosen = self.drawn.indices
        return torch.arange(len(self)) if chosen is None else chosen

    @property
    def batch_size(self) -> int | None:
        """Examples per batch; None if the loader does not tell."""
        size = loader_option(self._loader, "batch_size")
        return None if size is None else int(size)

    @property
    def drop_last(self) -> bool:
        """Whether a smaller last batch is left out."""
        return bool(loader_option(self._loader, "drop_last"))

    @property
    def read(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to the loader's batch of them."""
        return training_reader(self._loader)

    @property
    def read_for_evaluation(self) -> Callable[[Tensor], Any]:
        """The same without augmentation, if known."""
        return evaluation_reader(self._loader)

    def changed(
        self,
        transforms: Sequence[ExampleTransform],
        owners: Callable[[], npt.NDArray[np.int64]],
        seed: int,
        *,
        augmented: bool,
    ) -> Callable[[Tensor], Any]:
        """Return the function from indices, shape (B,), to a batch of examples changed one by one."""
        dataset = self.dataset if augmented else without_augmentation(self.dataset)
        return changed_reader(self._loader, dataset, transforms, owners, seed)

    @property
    def reads_by_index(self) -> bool:
        """Whether a batch is a plain selection of rows in memory, the same at every reading."""
        return reads_by_index(self.dataset, self._loader.collate_fn)

    @property
    def has_own_collate(self) -> bool:
        """Whether batches are made of examples by a function of the source's own."""
        collate = self._loader.collate_fn
        return collate is not default_collate and not gathers(self.dataset, collate)


def _check_loader(loader: Any, method: str) -> None:
    """Refuse what cannot be divided by index, or is not iterated as a DataLoader is."""
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) and not isinstance(loader, Dataset):
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set, got several "
            f"({type(loader).__name__}): a client draws from one. Put their data sets into one, e.g. a "
            "ConcatDataset, or one whose items hold an example of each"
        )
    is_loader = isinstance(loader, DataLoader)
    if not is_loader or isinstance(loader.dataset, IterableDataset) or not _is_map(loader.dataset):
        found = type(loader.dataset if is_loader else loader).__name__
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set (with __len__ and "
            f"__getitem__), got {found}: its examples are divided among the clients by index"
        )
    if loader.batch_sampler is None and isinstance(loader.sampler, _SINGLE):
        raise ConfigurationError(
            f"{method} has batch_size=None, so that each item of its data set is a batch, which cannot "
            "be divided among clients: return a DataLoader with a batch_size over single examples"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"{method} returns a {type(loader).__name__}, whose own __iter__ clients do not go through: "
            "return a DataLoader, and do what it does in collate_fn or on_after_batch_transfer"
        )


def _is_map(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


_WAY_OUT = "or set data.ignore_sampler to true: then every client shuffles all of its examples"


class Drawn(NamedTuple):
    """What a pass draws from a data set of N examples.

    Attributes:
        indices: of which examples, shape (M,); None for all.
        weights: how likely each of all is to be drawn, with replacement, shape (N,), float64; None
            where a pass draws each once.
    """

    indices: Tensor | None = None
    weights: Tensor | None = None


def drawn_examples(loader: DataLoader[Any], source: str) -> Drawn:
    """Return what a loader's sampler draws.

    Args:
        loader: over a map-style data set.
        source: who made it, for errors.

    Raises:
        ConfigurationError: for a sampler that clients cannot follow, by name.

    Example:
        >>> drawn_examples(DataLoader(range(9), sampler=SubsetRandomSampler([7, 4])), "Digits")
        Drawn(indices=tensor([7, 4]), weights=None)
        >>> drawn_examples(DataLoader(range(9), shuffle=True), "Digits")
        Drawn(indices=None, weights=None)
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    sampler = _example_sampler(loader, source)
    if isinstance(sampler, WeightedRandomSampler) and _iterates_as(sampler, WeightedRandomSampler):
        return _by_weight(sampler, count, source)
    if isinstance(sampler, RandomSampler) and _iterates_as(sampler, RandomSampler):
        return _at_random(sampler, count, source)
    if isinstance(sampler, SequentialSampler) and _iterates_as(sampler, SequentialSampler):
        return _some(range(len(sampler.data_source)), count, source)
    if isinstance(sampler, SubsetRandomSampler) and _iterates_as(sampler, SubsetRandomSampler):
        return _some(sampler.indices, count, source)
    if isinstance(sampler, (Sequence, np.ndarray, Tensor)):
        return _some(sampler, count, source)
    return _refuse(source, f"{type(sampler).__name__}")


def _example_sampler(loader: DataLoader[Any], source: str) -> Any:
    """Return what draws single examples; behind it may be batches of them."""
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(batches, BatchSampler) and _iterates_as(batches, BatchSampler):
        return batches.sampler
    return _refuse(source, f"{type(batches).__name__} as batch sampler")


def _iterates_as(sampler: Any, kind: type) -> bool:
    # a subclass may draw something else
    return type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _by_weight(sampler: WeightedRandomSampler, count: int, source: str) -> Drawn:
    weights = torch.zeros(count, dtype=torch.float64)
    given = torch.as_tensor(sampler.weights, dtype=torch.float64).cpu()
    if len(given) > count:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its WeightedRandomSampler has {len(given)} weights for "
            f"{count} examples: give one for each"
        )
    weights[: len(given)] = given
    possible = weights.nonzero().flatten()
    if not sampler.replacement:
        return _refuse(source, "WeightedRandomSampler with replacement=False")
    _check_length(sampler, {count, len(given), len(possible)}, source)
    return Drawn(None if len(possible) == count else possible, weights)


def _at_random(sampler: RandomSampler, count: int, source: str) -> Drawn:
    known = len(sampler.data_source)
    _check_length(sampler, {known}, source)
    drawn = _some(range(known), count, source)
    if sampler.replacement:
        return drawn._replace(weights=torch.ones(count, dtype=torch.float64))
    return drawn


def _check_length(sampler: Any, usual: set[int], source: str) -> None:
    if sampler.num_samples not in usual:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its {type(sampler).__name__} draws {sampler.num_samples} of "
            f"{max(usual)} examples a pass, and a client's pass draws as many as it has: leave "
            "num_samples at the number of examples, and say with federation.local_steps or "
            f"local_epochs how much clients train; {_WAY_OUT}"
        )


def _some(indices: Any, count: int, source: str) -> Drawn:
    if isinstance(indices, range) and indices == range(count):
        return Drawn()
    try:
        chosen = torch.as_tensor(np.asarray(indices)).long().flatten()
    except (TypeError, ValueError):
        return _refuse(source, f"a sampler of {type(indices[0]).__name__}")
    low, high = (int(f(chosen)) if len(chosen) else 0 for f in (torch.min, torch.max))
    if low < 0 or high >= count:
        raise ConfigurationError(
            f"{source}.train_dataloader(): its sampler draws example {low if low < 0 else high}, and "
            f"the data set has those from 0 to {count - 1}"
        )
    is_everything = len(chosen) == count and len(chosen.unique()) == count
    return Drawn() if is_everything else Drawn(chosen)


def _refuse(source: str, name: str) -> NoReturn:
    raise ConfigurationError(
        f"{source}.train_dataloader() draws its examples by {name}, which clients cannot follow: each "
        "draws batches of its own examples. Use a SequentialSampler, RandomSampler, SubsetRandomSampler "
        f"or WeightedRandomSampler (with replacement) and a batch_size; {_WAY_OUT}"
    )


def loader_option(loader: DataLoader[Any], name: str) -> Any:
    """Return an option of a loader, e.g. ``batch_size``; None if it does not tell.

    Example:
        >>> loader_option(DataLoader([1, 2, 3], batch_size=2), "batch_size")
        2
    """
    # a loader with a batch sampler, or one that is asked for whole batches, keeps it there
    places = (loader, loader.batch_sampler, loader.sampler)
    return next((value for place in places if (value := getattr(place, name, None))), None)


def training_reader(loader: DataLoader[Any]) -> Callable[[Tensor], Any]:
    """Return the function from indices, shape (B,), to the batch that a loader makes of them.

    Example:
        >>> import torch
        >>> training_reader(DataLoader(["a", "b", "c"], collate_fn="".join))(torch.tensor([2, 0]))
        'ca'
    """
    return _reader(loader, loader.dataset)


def evaluation_reader(loader: DataLoader[Any]) -> Callable[[Tensor], Any]:
    """Return the function from indices, shape (B,), to a batch without augmentation, if known.

    A data set knows if it has a method ``evaluation`` that returns itself without.

    Example:
        >>> import torch
        >>> evaluation_reader(DataLoader([4.0, 5.0, 6.0]))(torch.tensor([2, 0]))
        tensor([6., 4.], dtype=torch.float64)
    """
    return _reader(loader, without_augmentation(loader.dataset))


def _reader(loader: DataLoader[Any], dataset: Dataset[Any]) -> Callable[[Tensor], Any]:
    # a loader without a batch sampler asks for what its sampler draws, here whole lists of indices
    return batch_reader(dataset, loader.collate_fn, at_once=loader.batch_sampler is None)


def without_augmentation(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a data set whose examples are not augmented, if it knows."""
    if type(dataset) is Subset:
        return Subset(without_augmentation(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([without_augmentation(part) for part in dataset.datasets])
    evaluation = getattr(dataset, "evaluation", None)
    return evaluation() if callable(evaluation) else dataset
