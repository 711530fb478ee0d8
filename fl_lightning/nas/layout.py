"""Where to put the nodes of a small graph so that its labels can be read.

Nodes stand from left to right by column; every choice of heights is tried, and the one of least
disorder taken: labels over labels, lines through nodes or labels, lines that cross, length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Edge = tuple[int, int, str]  # source, target, label; no letters: no label

LEVELS = (0.0, 1.0, -1.0, 2.0, -2.0)  # heights to try
COLUMN_WIDTH, LEVEL_HEIGHT = 1.7, 0.75  # inches
LABEL_SIZE = np.array([1.1, 0.2])  # of a box around an operation's name, inches
NODE_RADIUS = 0.25
_ALONG = np.linspace(0.0, 1.0, 21)[1:-1, None]


def place(columns: Sequence[float], edges: Sequence[Edge], fixed: Mapping[int, float]) -> Points:
    """Return where each node stands, in inches, (num_nodes, 2).

    Args:
        columns: of each node.
        edges: between them.
        fixed: the level of nodes whose height is given; the others are few (5 levels each).
    """
    heights = [(fixed[node],) if node in fixed else LEVELS for node in range(len(columns))]
    levels = np.array(list(product(*heights)))
    across = np.broadcast_to(np.multiply(columns, COLUMN_WIDTH), levels.shape)
    choices = np.stack([across, levels * LEVEL_HEIGHT], axis=-1)
    best: Points = choices[_disorder(choices, edges).argmin()]
    return best


def middles(points: Points, edges: Sequence[Edge]) -> Points:
    """Return where each edge's label stands, (…, num_edges, 2)."""
    return (points[..., _sources(edges), :] + points[..., _targets(edges), :]) / 2


def _disorder(points: Points, edges: Sequence[Edge]) -> Points:
    """Return how hard each choice is to read, (choices,) for points (choices, nodes, 2)."""
    if not edges:
        return np.zeros(len(points))
    starts, ends = points[:, _sources(edges)], points[:, _targets(edges)]
    named = [number for number, (*_, label) in enumerate(edges) if label]
    labels = middles(points, edges)[:, named]
    lines = starts[:, :, None] + _ALONG * (ends - starts)[:, :, None]  # choice, edge, place, 2

    nodes = np.arange(points.shape[1])
    own_node = (nodes == np.array(_sources(edges))[:, None]) | (
        nodes == np.array(_targets(edges))[:, None]
    )
    distances = np.linalg.norm(lines[:, :, :, None] - points[:, None, None], axis=-1)
    through_nodes = (distances < NODE_RADIUS + 0.15).any(2) & ~own_node

    over_labels = _inside(lines[:, :, :, None] - labels[:, None, None], 0.55 * LABEL_SIZE).any(2)
    over_labels &= np.arange(len(edges))[:, None] != np.array(named, dtype=int)

    label_pairs = _inside(labels[:, :, None] - labels[:, None], LABEL_SIZE)
    label_pairs &= ~np.eye(len(named), dtype=bool)
    node_pairs = _inside(labels[:, :, None] - points[:, None], LABEL_SIZE / 2 + NODE_RADIUS)

    disorder: Points = (
        60.0 * through_nodes.sum((1, 2))
        + 3.0 * over_labels.sum((1, 2))
        + 10.0 * label_pairs.sum((1, 2))
        + 20.0 * node_pairs.sum((1, 2))
        + 1.0 * _crossings(starts, ends).sum((1, 2))
        + 0.5 * np.linalg.norm(ends - starts, axis=-1).sum(1)
    )
    return disorder


def _inside(offsets: Points, half_size: Points) -> NDArray[np.bool_]:
    return np.asarray((abs(offsets) < half_size).all(-1))


def _crossings(starts: Points, ends: Points) -> NDArray[np.bool_]:
    """Which edges cross, each pair twice; those that meet at a node do not."""

    def sides(points: Points) -> Points:
        """On which side of each line each point is, (choices, lines, points)."""
        along = (ends - starts)[:, :, None]
        to = points[:, None] - starts[:, :, None]
        return np.round(along[..., 0] * to[..., 1] - along[..., 1] * to[..., 0], 9)

    parted = sides(starts) * sides(ends) < 0
    return parted & parted.swapaxes(1, 2)


def _sources(edges: Sequence[Edge]) -> list[int]:
    return [source for source, _, _ in edges]


def _targets(edges: Sequence[Edge]) -> list[int]:
    return [target for _, target, _ in edges]
