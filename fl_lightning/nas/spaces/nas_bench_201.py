"""NAS-Bench-201: cells of four nodes and six edges, with published results of all 15,625 cells.

    x_j = Σ_{i<j} o_ij(x_i),  o_ij one of none, skip, 1×1 and 3×3 convolution, 3×3 average pool

The network: a 3×3 convolution, three stages of cells with C, 2C and 4C channels, residual blocks between
the stages that halve the image size, and a classifier on the mean over pixels.
Source: Dong & Yang 2020, ICLR, sections 2.1 to 2.3, and the released code.
Differs: on images of odd side the pool of the shortcut rounds up, as the convolution of the block does; the
released code fails on them.

Published results are read from a CSV file that you provide, with these columns in any order:

    ArchitectureString              the cell, |op~0|+|op~0|op~1|+|op~0|op~1|op~2|
    CIFAR10TestAccuracy200Epochs    test accuracy on CIFAR-10 in percent, after 200 epochs, mean over seeds
    CIFAR100TestAccuracy200Epochs   the same on CIFAR-100
    ImageNetTestAccuracy200Epochs   the same on ImageNet-16-120

Nothing of the benchmark is part of this package.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, final

import numpy as np
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import (
    Candidate,
    CellNetwork,
    MakeEdge,
    ReLUConvBN,
    Row,
    RowSpace,
    Zero,
    average_pool,
    next_node,
)
from fl_lightning.nas.spaces.space import Architecture, Decision

# in the order of the strings: node by node, its sources in order
EDGES = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))


@final
@dataclass(frozen=True)
class NASBench201(RowSpace):
    """Cell space of NAS-Bench-201: 15,625 cells with six edges, each with one of five operations.

    Example:
        >>> space = NASBench201()
        >>> cell = space.parse(
        ...     "|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|"
        ...     "+|skip_connect~0|nor_conv_3x3~1|skip_connect~2|"
        ... )
        >>> space.canonical(cell)
        '((0)@nor_conv_3x3)@avg_pool_3x3+(0)@nor_conv_3x3+((0)@nor_conv_3x3)@nor_conv_3x3+0'
        >>> import torch
        >>> network = space.build(cell, num_classes=10, channels=4, cells=1)
        >>> network(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """

    name: ClassVar[str] = "nas_bench_201"
    operations: ClassVar[tuple[str, ...]] = (
        "none",
        "skip_connect",
        "nor_conv_1x1",
        "nor_conv_3x3",
        "avg_pool_3x3",
    )
    none: ClassVar[int] = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The six edges of the cell, in the order of α's rows."""
        return tuple(Row("cell", *edge) for edge in EDGES)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the space: one choice of an operation per edge."""
        return tuple(Decision(str(row), self.operations) for row in self.rows)

    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the names of the cell's nodes: input, 1, 2, output."""
        return ("input", "1", "2", "output")

    @property
    def separators(self) -> tuple[str, ...]:
        """Separators in the benchmark's strings, e.g. ``|skip_connect~0|+|none~0|…~1|+|…~0|…~1|…~2|``."""
        return ("|", "~0|+|", "~0|", "~1|+|", "~0|", "~1|", "~2|")

    def canonical(self, architecture: Architecture) -> str:
        """Return the benchmark's string for the function of a cell; the 15,625 cells have 6,466 different strings.

        Cells with equal strings compute the same function of the same weights. Cells with different strings
        may do so too, because sums are not flattened, and edges without effect are kept.
        """
        nodes = ["0"]
        for target in (1, 2, 3):
            terms = [
                _term(nodes[source], self.operations[choice])
                for (source, other), choice in zip(EDGES, architecture.choices, strict=True)
                if other == target
            ]
            nodes.append("+".join(sorted(terms)))
        return nodes[-1]

    def network(
        self,
        make_edge: MakeEdge,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int = 16,
        cells: int = 5,
        affine: bool = True,
    ) -> CellNetwork:
        """Build a network of three stages, each with ``cells`` cells, of C, 2C and 4C channels."""
        ops, stages = candidates(affine), nn.Sequential()
        stem = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        parts: dict[str, nn.Module] = {"stem": nn.Sequential(stem, nn.BatchNorm2d(channels))}
        for width in (channels, 2 * channels, 4 * channels):
            if width > channels:
                stages.append(ResidualReduction(width // 2, width))
            stages.extend(NASBench201Cell(make_edge, width, ops) for _ in range(cells))
        parts["cells"] = stages
        parts["norm"] = nn.Sequential(nn.BatchNorm2d(4 * channels), nn.ReLU())
        parts["pool"], parts["flatten"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return CellNetwork({**parts, "classifier": nn.Linear(4 * channels, num_classes)})


def _term(source: str, operation: str) -> str:
    if operation == "none" or source == "#":
        return "#"
    return source if operation == "skip_connect" else f"({source})@{operation}"


def candidates(affine: bool) -> tuple[Candidate, ...]:
    """Return constructors of the candidate operations, in the order of `NASBench201.operations`."""
    return (
        lambda channels_in, channels_out, stride: Zero(stride),
        lambda channels_in, channels_out, stride: nn.Identity(),
        lambda channels_in, channels_out, stride: ReLUConvBN(
            channels_in, channels_out, 1, stride, affine
        ),
        lambda channels_in, channels_out, stride: ReLUConvBN(
            channels_in, channels_out, 3, stride, affine
        ),
        lambda channels_in, channels_out, stride: average_pool(stride),
    )


class NASBench201Cell(nn.Module):
    """Cell of NAS-Bench-201: each node is the sum of its incoming edges."""

    def __init__(self, make_edge: MakeEdge, channels: int, ops: Sequence[Candidate]) -> None:
        super().__init__()
        made = {
            f"{source}_{target}": make_edge(row, ops, channels, channels, 1)
            for row, (source, target) in enumerate(EDGES)
        }
        self.edges = nn.ModuleDict({name: edge for name, edge in made.items() if edge is not None})

    def forward(self, x: Tensor) -> Tensor:
        """Return the value of the cell's last node; zeros if no edge enters it."""
        nodes = [x]
        for _ in range(3):
            nodes.append(next_node(self.edges, nodes))
        return nodes[-1]


class ResidualReduction(nn.Module):
    """Residual block that halves the image size and changes the number of channels."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            ReLUConvBN(channels_in, channels_out, 3, 2),
            ReLUConvBN(channels_out, channels_out, 3, 1),
        )
        self.shortcut = nn.Sequential(
            nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(channels_in, channels_out, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (batch, channels_out, ⌈side / 2⌉, ⌈side / 2⌉)."""
        return self.block(x) + self.shortcut(x)  # type: ignore[no-any-return]


DataSet = Literal["cifar10", "cifar100", "imagenet16_120"]
CELL_COLUMN = "ArchitectureString"
COLUMNS: dict[DataSet, str] = {
    "cifar10": "CIFAR10TestAccuracy200Epochs",
    "cifar100": "CIFAR100TestAccuracy200Epochs",
    "imagenet16_120": "ImageNetTestAccuracy200Epochs",
}


@dataclass(frozen=True, eq=False)
class NASBench201Table:
    """Published test accuracies of NAS-Bench-201's cells, in percent, read from a CSV file.

    Attributes:
        path: path of the file, for messages.
        rows: row of every cell.
        accuracies: accuracies by data set, shape (num_rows,).
    """

    path: Path
    rows: Mapping[Architecture, int]
    accuracies: Mapping[DataSet, np.ndarray]

    @classmethod
    def read(cls, path: str | Path) -> NASBench201Table:
        """Read published accuracies from a CSV file, which may hold only a part of the cells.

        Raises:
            ConfigurationError: if the file or a column is missing, or a row is malformed or repeated.
        """
        import pandas  # half a second to import

        path, space = Path(path), NASBench201()
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                lines = {reader.line_num: row for row in reader}  # noqa: B035 - it counts on
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigurationError(
                f"table {path} of NAS-Bench-201 cannot be read: {error}. Give the path of a CSV file"
            ) from error
        names = list(dict.fromkeys(reader.fieldnames or []))
        table = pandas.DataFrame([*lines.values()], [*lines], names, dtype=str).fillna("")
        missing = [name for name in (CELL_COLUMN, *COLUMNS.values()) if name not in table]
        if missing or not len(table):
            what = f"lacks the columns {', '.join(missing)}" if missing else "has no cells"
            raise ConfigurationError(f"table {path} {what}; its first line has: {', '.join(table)}")
        rows: dict[Architecture, int] = {}
        for line, text in table[CELL_COLUMN].items():
            try:
                cell = space.parse(text)
            except ConfigurationError as error:
                raise ConfigurationError(f"table {path}, line {line}: {error}") from None
            if cell in rows:
                raise ConfigurationError(
                    f"table {path}, line {line}: {cell} has a row already: delete one of them"
                )
            rows[cell] = len(rows)
        accuracies: dict[DataSet, np.ndarray] = {}
        for name, column in COLUMNS.items():
            values = pandas.to_numeric(table[column], errors="coerce")
            wrong = table[column][~values.between(0, 100)]
            if len(wrong):
                raise ConfigurationError(
                    f"table {path}, line {wrong.index[0]}: {column} must be a number from 0 to 100, got "
                    f"{wrong.iloc[0]!r}"
                )
            accuracies[name] = values.to_numpy(dtype=float)
        return cls(path, rows, accuracies)

    def __len__(self) -> int:
        return len(self.rows)

    def lookup(self, cell: Architecture | str) -> dict[DataSet, float]:
        """Return the test accuracy of a cell on each data set, in percent.

        Raises:
            ConfigurationError: if the cell is invalid or not in the table.
        """
        space = NASBench201()
        cell = space.parse(cell) if isinstance(cell, str) else cell
        if cell.space != space:
            raise ConfigurationError(
                f"table {self.path} has cells of {NASBench201.name}, got one of {cell.space.name}: {cell}"
            )
        if cell not in self.rows:
            raise ConfigurationError(
                f"{cell} is not among the {len(self):,} cells of {self.path}: give a table with all cells of the "
                "space (--table)"
            )
        row = self.rows[cell]
        return {name: float(column[row]) for name, column in self.accuracies.items()}
