"""Examples that a source's training loader draws, and functions that read their batches.

The loader's sampler draws           clients draw
    all examples, in any order         all of their own, shuffled
    some examples                      these examples alone, which are divided among the clients
    examples by weight                 by the weights of their own examples, with replacement:
                                       p_i = w_i / Σ_(j of the client) w_j

Other samplers are rejected, because clients would silently ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

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
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.shards import batch_reader

# samplers that draw one example at a time
_SINGLE = SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def check_loader(loader: Any, method: str) -> None:
    """Raise ConfigurationError if a loader's examples cannot be divided and read by index.

    Args:
        loader: result of a data module's ``train_dataloader``.
        method: name of the method, for errors.
    """
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) and not isinstance(loader, Dataset):
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set, got several "
            f"({type(loader).__name__}): a client draws from one. Put their data sets into one, e.g. a "
            "ConcatDataset, or one whose items hold an example of each"
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
            f"{method} has batch_size=None, so that each item of its data set is a batch, which cannot "
            "be divided among clients: return a DataLoader with a batch_size over single examples"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"{method} returns a {type(loader).__name__}, whose own __iter__ clients do not use: return a "
            "DataLoader, and move the code of __iter__ to collate_fn or on_after_batch_transfer"
        )


_WAY_OUT = "or set data.ignore_sampler to true: then every client shuffles all of its examples"


class Drawn(NamedTuple):
    """Examples that a pass over a loader draws from a data set of N examples.

    Attributes:
        indices: indices of the examples, shape (M,); None for all.
        weights: weights of all examples for draws with replacement, float64 of shape (N,); None if a
            pass draws each example once.
    """

    indices: Tensor | None = None
    weights: Tensor | None = None


def drawn_examples(loader: DataLoader[Any], source: str) -> Drawn:
    """Return the examples that a loader's sampler draws.

    Args:
        loader: loader over a map-style data set.
        source: name of the data module, for errors.

    Raises:
        ConfigurationError: if clients cannot reproduce the sampler, by name.

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
    """Return the sampler of single examples, which may be inside a batch sampler."""
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(batches, BatchSampler) and _iterates_as(batches, BatchSampler):
        return batches.sampler
    return _refuse(source, f"{type(batches).__name__} as batch sampler")


def _iterates_as(sampler: Any, kind: type) -> bool:
    # a subclass may override the draw
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
    """Return an option of a loader, e.g. ``batch_size``, or None if it has none.

    Example:
        >>> loader_option(DataLoader([1, 2, 3], batch_size=2), "batch_size")
        2
    """
    # a loader with a batch sampler, or one over whole batches, has the option there
    places = (loader, loader.batch_sampler, loader.sampler)
    return next((value for place in places if (value := getattr(place, name, None))), None)


def example_reader(loader: DataLoader[Any], *, augmented: bool = False) -> Callable[[Tensor], Any]:
    """Return a function from indices, shape (B,), to a batch of the loader.

    Without augmentation if possible, i.e. if the data set has a method ``evaluation`` that returns the set
    without it.

    Args:
        loader: loader over a map-style data set.
        augmented: whether examples may be augmented.

    Example:
        >>> import torch
        >>> example_reader(DataLoader([4.0, 5.0, 6.0]))(torch.tensor([2, 0]))
        tensor([6., 4.], dtype=torch.float64)
    """
    dataset = loader.dataset if augmented else without_augmentation(loader.dataset)
    # a loader without a batch sampler passes on what its sampler draws, here whole lists of indices
    return batch_reader(dataset, loader.collate_fn, at_once=loader.batch_sampler is None)


def without_augmentation(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the data set without augmentation, if it has a method ``evaluation``."""
    if type(dataset) is Subset:
        return Subset(without_augmentation(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([without_augmentation(part) for part in dataset.datasets])
    evaluation = getattr(dataset, "evaluation", None)
    return evaluation() if callable(evaluation) else dataset
