"""Results as Markdown: a row a variant, mean ± std over seeds; of two axes a matrix as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fl_lightning.experiments.results import BYTES, RunResult, Spread, by_variant, spreads


def results_table(results: Sequence[RunResult]) -> str:
    """Return a table with a row for every variant that has a finished run.

    The last column counts runs. Bytes are totals over rounds and clients, seconds those of a run.
    """
    return markdown(*results_cells(results))


def results_cells(results: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Return the head of that table, and its rows."""
    rows = {name: spreads(group) for name, group in by_variant(results).items()}
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [
        [name, *(_cell(column, row.get(column)) for column in columns), str(row["seconds"].n)]
        for name, row in rows.items()
    ]
    return ["variant", *columns, "runs"], lines


def matrix_table(
    results: Sequence[RunResult], metric: str, axes: Mapping[str, Sequence[str]]
) -> str:
    """Return the final values of one metric over two axes: rows the first, columns the second."""
    (down, _), (across, _) = axes.items()
    return f"{metric}: {down} by {across}\n\n" + markdown(*matrix_cells(results, metric, axes))


def matrix_cells(
    results: Sequence[RunResult], metric: str, axes: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return the head of that table, and its rows."""
    (down, rows), (across, columns) = axes.items()
    cells = {
        (group[0].variant.coordinates[down], group[0].variant.coordinates[across]): spreads(group)
        for group in by_variant(results).values()
    }
    lines = [
        [row, *(_cell(metric, cells.get((row, column), {}).get(metric)) for column in columns)]
        for row in rows
    ]
    return [f"{down} \\ {across}", *columns], lines


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are padded to be read as they stand.

    Example:
        >>> print(markdown(["variant", "runs"], [["dense", "3"]]))
        | variant | runs |
        |---------|------|
        | dense   | 3    |
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in (list(head), *rows)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(column: str, spread: Spread | None) -> str:
    """Return a mean with its spread, in the units of its column.

    Example:
        >>> _cell("test/accuracy", Spread(0.51234, 0.01, 3)), _cell("bytes up", Spread(2e6, 0, 3))
        ('0.512 ± 0.010', '2 MB')
    """
    if spread is None:
        return "-"
    if column in BYTES:
        return _size(spread.mean)
    if column in ("seconds", "best round"):
        return f"{spread.mean:.0f}"
    digits = 3 if abs(spread.mean) < 100 else 0
    std = "" if math.isnan(spread.std) else f" ± {spread.std:.{digits}f}"
    return f"{spread.mean:.{digits}f}{std}"


def _size(num_bytes: float) -> str:
    unit, size = ("MB", 1e6) if num_bytes >= 1e6 else ("kB", 1e3)
    return (
        f"{num_bytes / size:,.4g} {unit}" if num_bytes < 1e9 else f"{num_bytes / size:,.0f} {unit}"
    )
