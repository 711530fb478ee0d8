"""Tables that are read on a screen."""

from __future__ import annotations

from collections.abc import Sequence

_BETWEEN = "  "


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is aligned to the left and whose others to the right."""
    if not lines:
        return ""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines)
    return "\n".join(_BETWEEN.join(row).rstrip() for row in rows)


def in_blocks(lines: Sequence[Sequence[str]], width: int) -> str:
    """Return a table that is no wider than the screen: columns that have no room come below.

    Args:
        lines: the head first; the first column names a row, and begins every block.
        width: columns of the screen.

    Example:
        >>> print(in_blocks([["", "loss", "accuracy"], ["a", "0.5", "0.9"]], 14))
           loss
        a   0.5
        <BLANKLINE>
           accuracy
        a       0.9
    """
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks: list[list[int]] = [[]]
    used = first
    for column, needed in enumerate(others, 1):
        used += len(_BETWEEN) + needed
        if used > width and blocks[-1]:
            blocks.append([])
            used = first + len(_BETWEEN) + needed
        blocks[-1].append(column)
    tables = [aligned([[line[0], *(line[c] for c in block)] for line in lines]) for block in blocks]
    return "\n\n".join(tables)
