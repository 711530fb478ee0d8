"""Graphs such as the cells of an architecture search: nodes in a row, edges with labels.

Edges between neighbours are straight. Other edges are arcs: above the row from even nodes, below it from odd
nodes, and higher the longer they are. So no edge passes through a node, and no two labels overlap: labels on
one side have different heights or are two columns apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Edge = tuple[int, int, str]  # source, target, label; an edge without a label is gray
COLUMN_WIDTH = 1.9  # inches
NODE_RADIUS = 0.25
RISE = 0.35  # height of the control point of an arc, divided by the length of the arc

# one color per operation of the published spaces, distinct also for red-green color blindness
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


@dataclass(frozen=True)
class Graph:
    """A directed graph to draw, such as a cell of an architecture search; its nodes stand in a row.

    Attributes:
        title: title above the graph.
        nodes: names of the nodes; the last one is the output.
        edges: source, target and label of each edge; a source has a lower number than its target.
        num_inputs: number of input nodes, which come first.
    """

    title: str
    nodes: Sequence[str]
    edges: Sequence[Edge]
    num_inputs: int = 1

    def on_a_path(self) -> list[bool]:
        """Return for each edge whether a path from an input node to the output node uses it.

        Example:
            >>> edges = [(0, 1, "skip"), (2, 3, "skip"), (1, 3, "pool")]
            >>> Graph("", ["in", "1", "2", "out"], edges).on_a_path()
            [True, False, True]
        """
        reached, useful = set(range(self.num_inputs)), {len(self.nodes) - 1}
        for source, target, _ in sorted(self.edges):
            reached |= {target} if source in reached else set()
        for source, target, _ in sorted(self.edges, reverse=True):
            useful |= {source} if target in useful else set()
        return [source in reached and target in useful for source, target, _ in self.edges]

    def limits(self) -> tuple[float, float]:
        """Lower and upper limit of the vertical axis of the drawn graph, in inches."""
        heights = [middle(source, target)[1] for source, target, _ in self.edges]
        return min([0.0, *heights]) - 0.5, max([0.0, *heights]) + 0.5


def graph_figure(graphs: Sequence[Graph], title: str = "") -> Figure:
    """Draw graphs in one figure, below one another.

    Dashed edges have no effect: no path from an input to the output uses them.
    """
    from matplotlib.figure import Figure  # a second to import

    width = max(COLUMN_WIDTH * (len(graph.nodes) - 1) + 1.4 for graph in graphs)
    heights = [np.ptp(graph.limits()) for graph in graphs]
    figure = Figure(figsize=(width, sum(heights) + 0.35 * bool(title)), layout="constrained")
    panels = figure.subplots(len(graphs), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, graph in zip(panels, graphs, strict=True):
        _draw_graph(panel, graph)
        if len(graphs) > 1:
            panel.set_title(graph.title, loc="left", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def arc(source: int, target: int) -> float:
    """Rise of an edge's arc (its control point) per length of the edge; positive above the row of nodes."""
    return 0.0 if target - source == 1 else RISE * (-1) ** source


def middle(source: int, target: int) -> tuple[float, float]:
    """Position (x, y) of the label of an edge, at the middle of its arc, in inches."""
    across, length = (source + target) / 2, target - source
    return COLUMN_WIDTH * across, COLUMN_WIDTH * length * arc(source, target) / 2


def _draw_graph(panel: Any, graph: Graph) -> None:
    for (source, target, name), is_used in zip(graph.edges, graph.on_a_path(), strict=True):
        color = _color(name) if name else "#b0b0b0"
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
    for number, name in enumerate(graph.nodes):
        shown = f"${name}$" if "_" in name else name
        node = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3f8", "edgecolor": "#444444"}
        place = COLUMN_WIDTH * number, 0.0
        panel.text(*place, shown, ha="center", va="center", fontsize=9, bbox=node, zorder=6)
    right = COLUMN_WIDTH * (len(graph.nodes) - 1) + 0.5
    panel.set(xlim=(-0.5, right), ylim=graph.limits(), aspect="equal")
    panel.axis("off")


def _color(operation: str) -> str:
    return COLORS.get(operation, _OTHERS[sum(map(ord, operation)) % len(_OTHERS)])
