"""Pictures of a search: a cell as a graph, architecture parameters as bars, a Pareto front.

Nodes of a graph are placed from left to right by column; all choices of heights are tried, and the one with
the smallest disorder is used: overlapping labels, lines through nodes or labels, crossings, length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.space import Architecture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Points = NDArray[np.float64]


Edge = tuple[int, int, str]  # source, target, label; no letters: no label


_Graph = tuple[Edge, ...]


# the same operation has the same color in every space; told apart without seeing red and green
COLORS = {
    "none": "#c8c8c8",
    "skip_connect": "#444444",
    "avg_pool_3x3": "#e69f00",
    "max_pool_3x3": "#8c6d1f",
    "nor_conv_1x1": "#56b4e9",
    "nor_conv_3x3": "#0072b2",
    "sep_conv_3x3": "#0072b2",
    "sep_conv_5x5": "#56b4e9",
    "dil_conv_3x3": "#009e73",
    "dil_conv_5x5": "#cc79a7",
}
_OTHERS = ("#d55e00", "#7a5195", "#2f6b2f", "#b33f62", "#4a6fa5", "#a0a03c")


def cell_figure(architecture: Architecture, title: str = "") -> Figure:
    """Draw the cells of an architecture: nodes from left to right, on each edge its operation.

    Edges that are left out are not drawn. Gray arrows without a name concatenate. Dashed edges change
    nothing: no path from an input to the output runs over them.

    Args:
        architecture: of a space of cells.
        title: over it.

    Raises:
        ConfigurationError: if its space is not made of cells.
    """
    from matplotlib.figure import Figure

    space = architecture.space
    if not isinstance(space, CellSpace):
        raise ConfigurationError(f"{space.name} is not made of cells: there is no graph to draw")
    kinds = list(dict.fromkeys(row.cell for row in space.rows))
    graphs = [_graph(space, architecture, kind) for kind in kinds]
    placed = [_placed(space, kind, graph) for kind, graph in zip(kinds, graphs, strict=True)]
    spans = [np.ptp(points, axis=0) + 1.4 for points in placed]
    width = max(6.0, *(span[0] for span in spans))
    heights = [span[1] for span in spans]
    figure = Figure(figsize=(width, sum(heights) + 0.35 * bool(title)), layout="constrained")
    panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, kind, graph, points in zip(panels, kinds, graphs, placed, strict=True):
        _draw_graph(panel, space, kind, graph, points)
        if len(kinds) > 1:
            panel.set_title(_title(kind), loc="left", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def alpha_figure(space: CellSpace, probabilities: Tensor, title: str = "") -> Figure:
    """Draw what each edge's operations are worth: a bar of length one an edge.

    Args:
        space: of cells.
        probabilities: of the operations, (num_rows, num_operations); a row sums to one.
        title: over it.

    Raises:
        ValueError: if the shape is not the space's, or a number not finite.
    """
    from matplotlib.figure import Figure

    space.check_alpha(probabilities)
    values = probabilities.detach().double().cpu().numpy()
    rows = space.rows
    kinds = list(dict.fromkeys(row.cell for row in rows))
    most = max(sum(row.cell == kind for row in rows) for kind in kinds)
    figure = Figure(figsize=(1.0 + 4.6 * len(kinds), 1.3 + 0.3 * most), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        inside = [number for number, row in enumerate(rows) if row.cell == kind]
        names = [_edge_name(space, number) for number in inside]
        left = np.zeros(len(inside))
        for operation, name in enumerate(space.operations):
            width = values[inside, operation]
            panel.barh(names, width, left=left, label=name, color=_color(space, name))
            left += width
        panel.invert_yaxis()
        panel.set(xlim=(0, max(1.0, left.max())), xlabel="weight")
        panel.spines[["top", "right"]].set_visible(False)
        if len(kinds) > 1:
            panel.set_title(_title(kind), loc="left", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 3 + len(kinds) // 2),
        frameon=False,
        fontsize="small",
    )
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def front_figure(
    costs: Sequence[float], scores: Sequence[float], *, cost: str, score: str, title: str = ""
) -> Figure:
    """Draw networks by cost and score, and the front: those that no cheaper one equals.

    Args:
        costs: of each network.
        scores: of each network, higher is better.
        cost: what the costs are, with their unit.
        score: what the scores are.
        title: over it.
    """
    from matplotlib.figure import Figure

    best = on_front(costs, scores)
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    panel = figure.subplots()
    panel.scatter(costs, scores, s=14, color="#9db7cf", label="searched")
    front = np.array([(costs[number], scores[number]) for number in best]).reshape(-1, 2)
    panel.plot(*front.T, "o-", color="#0072b2", markersize=5, drawstyle="steps-post", label="front")
    panel.set(xlabel=cost, ylabel=score)
    panel.xaxis.set_major_formatter(lambda value, _: _short(value))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize="small", loc="lower right")
    if title:
        panel.set_title(title, fontsize=10)
    return figure


def on_front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Return the numbers of the networks that no other one beats in both, cheapest first.

    Example:
        >>> on_front([3, 1, 2, 2], [0.9, 0.5, 0.4, 0.7])
        [1, 3, 0]
    """
    front: list[int] = []
    for number in sorted(range(len(costs)), key=lambda n: (costs[n], -scores[n])):
        if not front or scores[number] > scores[front[-1]]:
            front.append(number)
    return front


def _title(kind: str) -> str:
    """Return the name of a kind of cell as a title: stages are called so already."""
    return kind if kind.startswith("stage") else f"{kind} cell"


def _short(value: float) -> str:
    """Return a number of an axis: 250 k, 1.5 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG; the same figure gives the same bytes.

    Args:
        figure: of matplotlib.
        path: of both, without an ending.

    Returns:
        The two files.
    """
    from matplotlib import rc_context

    files = Path(f"{path}.png"), Path(f"{path}.svg")
    files[0].parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(files[0], dpi=150)
    with rc_context({"svg.hashsalt": "fl_lightning"}):  # else ids in the file are random
        figure.savefig(files[1], metadata={"Date": None})
    return files


def _graph(space: CellSpace, architecture: Architecture, kind: str) -> _Graph:
    operations = space.operations_of(architecture)
    edges = [
        (row.source, row.target, space.operations[operation])
        for row, operation in zip(space.rows, operations, strict=True)
        if row.cell == kind and operation != space.none
    ]
    return (*edges, *((source, target, "") for source, target in space.concatenated(kind)))


def _placed(space: CellSpace, kind: str, graph: _Graph) -> Points:
    return _place(graph, len(space.node_names(kind)), _num_inputs(space, kind))


def _num_inputs(space: CellSpace, kind: str) -> int:
    """Number of a cell's input nodes, which no edge enters; they come first."""
    entered = {row.target for row in space.rows if row.cell == kind}
    entered |= {target for _, target in space.concatenated(kind)}
    return len(space.node_names(kind)) - len(entered)


def on_a_path(graph: Sequence[Edge], num_inputs: int, last: int) -> list[bool]:
    """Return of each edge whether a path from an input to the last node runs over it.

    Args:
        graph: edges, whose sources are before their targets.
        num_inputs: nodes that a path may begin with: the first ones.
        last: the node that it ends with.

    Example:
        >>> on_a_path([(0, 1, "skip"), (2, 3, "skip"), (1, 3, "pool")], num_inputs=1, last=3)
        [True, False, True]
    """
    reached, useful = set(range(num_inputs)), {last}
    for source, target, _ in sorted(graph):
        reached |= {target} if source in reached else set()
    for source, target, _ in sorted(graph, reverse=True):
        useful |= {source} if target in useful else set()
    return [source in reached and target in useful for source, target, _ in graph]


@lru_cache(maxsize=256)
def _place(graph: _Graph, num_nodes: int, num_inputs: int) -> Points:
    """Inputs share the first column, spread over the height; the others have a column each."""
    columns = [max(0.0, 1.0 + node - num_inputs) for node in range(num_nodes)]
    fixed = dict(zip(range(num_inputs), np.linspace(1.0, -1.0, num_inputs), strict=True))
    if num_inputs == 1:
        fixed = {0: 0.0}
    return place(columns, graph, {**fixed, num_nodes - 1: 0.0})


def _draw_graph(panel: Axes, space: CellSpace, kind: str, graph: _Graph, points: Points) -> None:
    used = on_a_path(graph, _num_inputs(space, kind), len(points) - 1)
    for (source, target, name), middle, is_used in zip(
        graph, middles(points, graph), used, strict=True
    ):
        color = _color(space, name) if name else "#b0b0b0"
        panel.annotate(
            "",
            points[target],
            points[source],
            arrowprops={
                "arrowstyle": "-|>",
                "color": color,
                "linewidth": 1.6 if name else 0.9,
                "linestyle": "solid" if is_used else "dashed",
                "alpha": 1.0 if is_used else 0.5,
                "shrinkA": 72 * NODE_RADIUS,
                "shrinkB": 72 * NODE_RADIUS,
            },
        )
        box = {
            "boxstyle": "round,pad=0.15",
            "facecolor": "white",
            "edgecolor": color,
            "linestyle": "solid" if is_used else "dashed",
        }
        if name:
            panel.text(
                middle[0], middle[1], name, ha="center", va="center", fontsize=8, bbox=box, zorder=5
            )
    for point, name in zip(points, space.node_names(kind), strict=True):
        shown = f"${name}$" if "_" in name else name
        node = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3f8", "edgecolor": "#444444"}
        panel.text(
            point[0], point[1], shown, ha="center", va="center", fontsize=9, bbox=node, zorder=6
        )
    low, high = points.min(0) - 0.5, points.max(0) + 0.5
    panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    panel.axis("off")


def _color(space: CellSpace, operation: str) -> str:
    return COLORS.get(operation, _OTHERS[space.operations.index(operation) % len(_OTHERS)])


def _edge_name(space: CellSpace, number: int) -> str:
    row = space.rows[number]
    names = [f"${name}$" if "_" in name else name for name in space.node_names(row.cell)]
    return f"{names[row.source]}→{names[row.target]}"


LEVELS = (0.0, 1.0, -1.0, 2.0, -2.0)  # heights to try
COLUMN_WIDTH, LEVEL_HEIGHT = 1.7, 0.75  # inches
LABEL_SIZE = np.array([1.1, 0.2])  # of a box around an operation's name, inches
NODE_RADIUS = 0.25
_ALONG = np.linspace(0.0, 1.0, 21)[1:-1, None]


def place(columns: Sequence[float], edges: Sequence[Edge], fixed: Mapping[int, float]) -> Points:
    """Position of each node in inches, (num_nodes, 2).

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
    """Position of each edge's label, (…, num_edges, 2)."""
    return (points[..., _sources(edges), :] + points[..., _targets(edges), :]) / 2


def _disorder(points: Points, edges: Sequence[Edge]) -> Points:
    """Disorder of each choice of points (choices, nodes, 2), shape (choices,)."""
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
    """True for pairs of edges that cross, each pair twice; edges with a common node do not cross."""

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
