"""Rows made of other rows: some of them, sums of them, one more. Nothing is copied but a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fl_lightning.server.robust.matrix import Floats, Rows


@final
@dataclass(frozen=True)
class ChosenRows:
    """Some of the rows.

    Attributes:
        rows: of which they are.
        places: which of them.
    """

    rows: Rows
    places: Sequence[int]

    @property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return self.rows.num_columns

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a block."""
        return self.rows.dtype

    @property
    def num_examples(self) -> Floats:
        """Examples behind each row."""
        return self.rows.num_examples[list(self.places)]

    @property
    def client_ids(self) -> list[int]:
        """Whose each row is."""
        return [self.rows.client_ids[place] for place in self.places]

    def __len__(self) -> int:
        return len(self.places)

    def blocks(self, rows: Sequence[int] | None = None) -> Iterator[tuple[slice, Floats]]:
        """Yield blocks of columns."""
        places = self.places if rows is None else [self.places[row] for row in rows]
        return self.rows.blocks(list(places))


@final
@dataclass(frozen=True)
class MixedRows:
    """Sums of rows: y_i = Σ_j M_ij x_j.

    Attributes:
        rows: the x.
        matrix: M, shape (m, n).
    """

    rows: Rows
    matrix: Floats

    @property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return self.rows.num_columns

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a block."""
        return self.rows.dtype

    @property
    def num_examples(self) -> Floats:
        """Examples behind each row, mixed as the rows are."""
        examples: Floats = self.matrix @ self.rows.num_examples
        return examples

    @property
    def client_ids(self) -> list[int]:
        """Nobody's: a mixed row is of several clients."""
        return []

    def __len__(self) -> int:
        return len(self.matrix)

    def blocks(self, rows: Sequence[int] | None = None) -> Iterator[tuple[slice, Floats]]:
        """Yield blocks of columns."""
        matrix = self.matrix if rows is None else self.matrix[list(rows)]
        matrix = matrix.astype(self.dtype)
        for columns, block in self.rows.blocks():
            yield columns, matrix @ block


@final
@dataclass(frozen=True)
class RowsAndOne:
    """All rows, and one vector more as the last.

    Attributes:
        rows: the first ones.
        last: shape (k,).
    """

    rows: Rows
    last: Floats

    @property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return self.rows.num_columns

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a block."""
        return self.rows.dtype

    @property
    def num_examples(self) -> Floats:
        """Examples behind each row; none behind the last."""
        return np.append(self.rows.num_examples, 0.0)

    @property
    def client_ids(self) -> list[int]:
        """Nobody's: the last row is no client's."""
        return []

    def __len__(self) -> int:
        return len(self.rows) + 1

    def blocks(self, rows: Sequence[int] | None = None) -> Iterator[tuple[slice, Floats]]:
        """Yield blocks of columns."""
        for columns, block in self.rows.blocks():
            whole = np.concatenate([block, self.last[None, columns].astype(self.dtype)])
            yield columns, whole if rows is None else whole[list(rows)]
