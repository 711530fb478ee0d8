"""Batches as sets of examples: their sizes, slices of them, and a limited number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError


def map_batch(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a batch, in tuples, lists and dicts.

    Raises:
        ConfigurationError: if the batch holds anything else.

    Example:
        >>> map_batch(lambda tensor: tensor + 1, {"x": torch.zeros(2)})
        {'x': tensor([1., 1.])}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, (list, tuple)):
        parts = [map_batch(function, part) for part in batch]
        # a named tuple takes its parts one by one
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: map_batch(function, part) for key, part in batch.items()}
    raise ConfigurationError(
        f"batches to score are tensors in tuples, lists or dicts, this one holds a "
        f"{type(batch).__name__}. Leave it out in the loader's collate_fn."
    )


def batch_size(batch: Any) -> int:
    """Return the number of examples in a batch: the length of all its tensors' first axes.

    Raises:
        ConfigurationError: if they are not of one length.
    """
    sizes: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        sizes.add(tensor.shape[0] if tensor.ndim else -1)
        return tensor

    map_batch(note, batch)
    if len(sizes) != 1 or -1 in sizes:
        raise ConfigurationError(
            "all tensors of a batch have an entry per example on their first axis; here the "
            f"lengths are {sorted(sizes)} (-1: no axis at all)"
        )
    return sizes.pop()


def chunks(batch: Any, size: int) -> Iterator[Any]:
    """Yield a batch in parts of at most ``size`` examples."""
    for start in range(0, batch_size(batch), size):
        yield map_batch(lambda tensor, at=start: tensor[at : at + size], batch)  # type: ignore[misc]


def limited(
    batches: Iterable[Any], max_examples: int | None, device: torch.device
) -> Iterator[tuple[Any, int]]:
    """Yield batches on a device with their sizes, the last one cut where the limit is reached."""
    left = max_examples
    for batch in batches:
        size = batch_size(batch)
        if left is not None and size > left:
            batch, size = next(chunks(batch, left)), left
        if size:
            yield map_batch(lambda tensor: tensor.to(device), batch), size
        if left is not None:
            left -= size
            if left == 0:
                return
