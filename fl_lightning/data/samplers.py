"""What a loader's sampler draws, as far as clients that draw for themselves can do the same.

    all examples, in order or shuffled     every client shuffles its own
    some examples                          they alone are divided among the clients
    examples by weight                     every client draws by the weights of its own:
                                           p_i = w_i / Σ_(j of the client) w_j, with replacement

Anything else is refused by name: it would be dropped without a word otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.core.errors import ConfigurationError

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
