"""Examples as rows of tensors in memory, beside the columns that tell whose they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.core.errors import ConfigurationError


@final
class Rows(Dataset[Any]):
    """A data set that hands out whole batches: some rows of each of its tensors.

    Args:
        parts: tensors of N rows each. By name they make batches that are dicts, without names tuples.
        columns: by name, what returns one value per row: for partitions, not in batches.
        pixels: the first part holds bytes, which leave as numbers in [0, 1].

    Raises:
        ConfigurationError: if parts have different lengths.

    Example:
        >>> rows = Rows([torch.eye(3), torch.arange(3)], {"who": lambda: np.array(["al", "bo", "al"])})
        >>> rows.gather(torch.tensor([2]))
        (tensor([[0., 0., 1.]]), tensor([2]))
        >>> rows.column_names, rows["who"]
        (['who'], array(['al', 'bo', 'al'], dtype='<U2'))
        >>> rows.select(torch.tensor([1]))["who"]
        array(['bo'], dtype='<U2')
    """

    is_deterministic: ClassVar = True

    def __init__(
        self,
        parts: Mapping[str, Tensor] | Sequence[Tensor],
        columns: Mapping[str, Callable[[], Any]] | None = None,
        *,
        pixels: bool = False,
    ) -> None:
        self._names = list(parts) if isinstance(parts, Mapping) else None
        self._parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        lengths = {len(part) for part in self._parts}
        if len(lengths) != 1:
            raise ConfigurationError(
                f"inputs and targets must have one row an example, got {sorted(lengths)} rows"
            )
        self._columns, self._pixels = dict(columns or {}), pixels
        self._rows: Tensor | None = None  # of the columns

    @property
    def targets(self) -> Tensor:
        """The last part."""
        return self._parts[-1]

    @property
    def column_names(self) -> list[str]:
        """What a partition may divide by; ``targets`` are always the last part."""
        return [name for name in self._columns if name != "targets"]

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int | str | Sequence[int] | Tensor) -> Any:
        """Return an example for a number, a batch for several, a column for a name."""
        if isinstance(index, str):
            values = np.asarray(self._columns[index]())
            return values if self._rows is None else values[self._rows.numpy()]
        indices = torch.as_tensor(index, dtype=torch.long)
        if indices.ndim:
            return self.gather(indices)
        place = range(len(self))[int(indices)]  # IndexError past the end, -1 is the last
        batch = self.gather(torch.tensor([place]))
        if isinstance(batch, dict):
            return {name: part[0] for name, part in batch.items()}
        return tuple(part[0] for part in batch)

    def gather(self, indices: Tensor) -> Any:
        """Return a batch of the rows at ``indices``, shape (B,), each in [0, N)."""
        parts = [part.index_select(0, indices) for part in self._parts]
        if self._pixels:
            parts[0] = parts[0].float().div_(255)
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))

    def select(self, indices: Tensor) -> Rows:
        """Return these rows only, in this order."""
        parts = [part.index_select(0, indices) for part in self._parts]
        named = parts if self._names is None else dict(zip(self._names, parts, strict=True))
        chosen = Rows(named, self._columns, pixels=self._pixels)
        chosen._rows = indices if self._rows is None else self._rows[indices]
        return chosen
