"""Pictures of cells as graphs, and the networks on a Pareto front.

Nodes of a graph stand in a row. Edges between neighbours are straight. Other edges are arcs: above the row
from even nodes, below it from odd nodes, and higher the longer they are. So no edge passes through a node,
and no two labels overlap: labels on one side have different heights or are two columns apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.space import Architecture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Edge = tuple[int, int, str]  # source, target, label; an empty label is not drawn
COLUMN_WIDTH = 1.9  # inches
NODE_RADIUS = 0.25
RISE = 0.35  # height of the control point of an arc, divided by the length of the arc

# one color per operation in all spaces, distinct also for red-green color blindness
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
    """Draw the cells of an architecture as graphs: nodes from left to right, edges with operations.

    Missing edges are not drawn. Gray arrows without a name concatenate. Dashed edges have no effect: no
    path from an input to the output uses them.

    Raises:
        ConfigurationError: if the space of the architecture is not made of cells.
    """
    from matplotlib.figure import Figure

    space = architecture.space
    if not isinstance(space, CellSpace):
        raise ConfigurationError(f"{space.name} is not made of cells: there is no graph to draw")
    kinds = list(dict.fromkeys(row.cell for row in space.rows))
    graphs = [_graph(space, architecture, kind) for kind in kinds]
    width = max(COLUMN_WIDTH * (len(space.node_names(kind)) - 1) + 1.4 for kind in kinds)
    heights = [np.ptp(_limits(graph)) for graph in graphs]
    figure = Figure(figsize=(width, sum(heights) + 0.35 * bool(title)), layout="constrained")
    panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, kind, graph in zip(panels, kinds, graphs, strict=True):
        _draw_graph(panel, space, kind, graph)
        if len(kinds) > 1:
            panel.set_title(_title(kind), loc="left", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def on_front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Return the indices of the networks on the Pareto front of cost and score, cheapest first.

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
    """Return the title of a kind of cell, e.g. "normal cell" or "stage 1"."""
    return kind if kind.startswith("stage") else f"{kind} cell"


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG; the same figure gives the same bytes.

    Args:
        figure: a figure of matplotlib.
        path: path of both files, without an ending.

    Returns:
        Paths of the two files.
    """
    from matplotlib import rc_context

    files = Path(f"{path}.png"), Path(f"{path}.svg")
    files[0].parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(files[0], dpi=150)
    with rc_context({"svg.hashsalt": "fl_lightning"}):  # else ids in the file are random
        figure.savefig(files[1], metadata={"Date": None})
    return files


def _graph(space: CellSpace, architecture: Architecture, kind: str) -> list[Edge]:
    operations = space.operations_of(architecture)
    edges = [
        (row.source, row.target, space.name_of(number, operation))
        for number, (row, operation) in enumerate(zip(space.rows, operations, strict=True))
        if row.cell == kind and operation != space.none
    ]
    return [*edges, *((source, target, "") for source, target in space.concatenated(kind))]


def _num_inputs(space: CellSpace, kind: str) -> int:
    """Number of input nodes of a cell: the first nodes, which no edge enters."""
    entered = {row.target for row in space.rows if row.cell == kind}
    entered |= {target for _, target in space.concatenated(kind)}
    return len(space.node_names(kind)) - len(entered)


def on_a_path(graph: Sequence[Edge], num_inputs: int, last: int) -> list[bool]:
    """Return for each edge whether it is on a path from an input to the last node.

    Args:
        graph: edges; a source has a lower number than its target.
        num_inputs: number of input nodes, which come first.
        last: number of the output node.

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


def arc(source: int, target: int) -> float:
    """Height of the control point of an edge divided by the edge's length; positive above the row."""
    return 0.0 if target - source == 1 else RISE * (-1) ** source


def middle(source: int, target: int) -> tuple[float, float]:
    """Position of the middle of an edge, where the label stands, in inches."""
    across, length = (source + target) / 2, target - source
    return COLUMN_WIDTH * across, COLUMN_WIDTH * length * arc(source, target) / 2


def _limits(graph: Sequence[Edge]) -> tuple[float, float]:
    """Lowest and highest vertical position in the panel of a graph, in inches."""
    heights = [middle(source, target)[1] for source, target, _ in graph]
    return min([0.0, *heights]) - 0.5, max([0.0, *heights]) + 0.5


def _draw_graph(panel: Axes, space: CellSpace, kind: str, graph: Sequence[Edge]) -> None:
    names = space.node_names(kind)
    used = on_a_path(graph, _num_inputs(space, kind), len(names) - 1)
    for (source, target, name), is_used in zip(graph, used, strict=True):
        color = _color(space, name) if name else "#b0b0b0"
        panel.annotate(
            "",
            (COLUMN_WIDTH * target, 0.0),
            (COLUMN_WIDTH * source, 0.0),
            arrowprops={
                "arrowstyle": "-|>",
                "connectionstyle": f"arc3,rad={-arc(source, target)}",
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
            place = middle(source, target)
            panel.text(*place, name, ha="center", va="center", fontsize=8, bbox=box, zorder=5)
    for number, name in enumerate(names):
        shown = f"${name}$" if "_" in name else name
        node = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3f8", "edgecolor": "#444444"}
        place = COLUMN_WIDTH * number, 0.0
        panel.text(*place, shown, ha="center", va="center", fontsize=9, bbox=node, zorder=6)
    right = COLUMN_WIDTH * (len(names) - 1) + 0.5
    panel.set(xlim=(-0.5, right), ylim=_limits(graph), aspect="equal")
    panel.axis("off")


def _color(space: CellSpace, operation: str) -> str:
    return COLORS.get(operation, _OTHERS[sum(map(ord, operation)) % len(_OTHERS)])
