"""Genotypes as papers print them: ``Genotype(normal=[('sep_conv_3x3', 1), …], normal_concat=…)``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from fl_lightning.core.errors import ConfigurationError

CELLS = ("normal", "reduction")
# node by node, ((operation, source), (operation, source))
Inputs = tuple[tuple[tuple[str, int], tuple[str, int]], ...]
_NODES = (2, 3, 4, 5)


def is_genotype(text: str) -> bool:
    """Whether a string seems to be one."""
    return text.startswith("Genotype(")


def read_genotype(text: str, space: str, operations: Sequence[str]) -> dict[str, Inputs]:
    """Return what a genotype says, for each cell.

    Raises:
        ConfigurationError: if it is none of this space; the message says where.
    """
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _refusal(text, space, (error.offset or 1) - 1, "it is no Python") from None
    if not isinstance(call, ast.Call):
        raise _refusal(text, space, 0, "expected Genotype(…) and nothing else")
    given = {word.arg: word.value for word in call.keywords}
    cells = {}
    for cell, name in zip(CELLS, ("normal", "reduce"), strict=True):
        if name not in given:
            raise _refusal(text, space, 0, f"it lacks {name}=[…]")
        cells[cell] = _read_cell(text, space, given[name], operations)
        _check_output(text, space, given.get(f"{name}_concat"))
    return cells


def _read_cell(text: str, space: str, cell: ast.expr, operations: Sequence[str]) -> Inputs:
    entries = cell.elts if isinstance(cell, ast.List) else []
    if len(entries) != 8:
        reason = "expected a list of 8 pairs (operation, source), two for each of the nodes 2 to 5"
        raise _refusal(text, space, cell.col_offset, reason)
    nodes = []
    for number, node in enumerate(_NODES):
        first, second = (
            _read_entry(text, space, entry, operations, node)
            for entry in entries[2 * number : 2 * number + 2]
        )
        if first[1] == second[1]:
            reason = f"node {node} reads two different nodes in this space, got {first[1]} twice"
            raise _refusal(text, space, entries[2 * number + 1].col_offset, reason)
        nodes.append((first, second))
    return tuple(nodes)


def _read_entry(
    text: str, space: str, entry: ast.expr, operations: Sequence[str], node: int
) -> tuple[str, int]:
    value = _literal(entry)
    if not (isinstance(value, tuple) and len(value) == 2):
        raise _refusal(text, space, entry.col_offset, "expected a pair (operation, source)")
    name, source = value
    if name not in operations:
        reason = f"expected an operation: {', '.join(operations)}"
        raise _refusal(text, space, entry.col_offset, reason)
    if not isinstance(source, int) or not 0 <= source < node:
        reason = f"node {node} reads an earlier one, 0 to {node - 1}"
        raise _refusal(text, space, entry.col_offset, reason)
    return name, source


def _check_output(text: str, space: str, output: ast.expr | None) -> None:
    """Refuse a cell that puts out other nodes than all four; none given means these."""
    if output is None or ast.unparse(output) in ("range(2, 6)", "list(range(2, 6))"):
        return
    value = _literal(output)
    if not isinstance(value, list | tuple) or list(value) != list(_NODES):
        reason = "cells of this space put out the nodes [2, 3, 4, 5]"
        raise _refusal(text, space, output.col_offset, reason)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _refusal(text: str, space: str, place: int, reason: str) -> ConfigurationError:
    here = f"at character {place + 1} ({text[place : place + 30]!r})"
    return ConfigurationError(f"not an architecture of {space}: {here} of the genotype: {reason}")
