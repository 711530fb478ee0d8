"""Charts of a report, drawn by matplotlib: PNG and SVG files, and SVG in an HTML page.

A chart has a title and a panel, which is a function that draws on matplotlib axes. Charts are drawn in the
colours of the light theme. In a page each colour is a CSS variable, so that the same drawing fits the dark
theme, and a tooltip shows the value of each point.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, QUIET, RULE = "#1b1c1e", "#5e6368", "#d9dce0"
SERIES = (
    *("#2a6fc9", "#c2570c", "#1b8a5a", "#8a4fc4"),
    *("#a8780a", "#c43a6b", "#0e8291", "#6b6f75"),
)
_DARK = (
    *("#eceef0", "#a3a9b0", "#3a3f46"),
    *("#6aa5f2", "#f0935a", "#4cc08a", "#b98de8"),
    *("#dcb04a", "#ee7ba2", "#4fc0cf", "#a8adb3"),
)
_NAMES = ("ink", "quiet", "rule", *(f"series-{n}" for n in range(len(SERIES))))
_VARIABLES = dict(zip((INK, QUIET, RULE, *SERIES), _NAMES, strict=True))


def series(number: int) -> str:
    """Return the colour of a chart's n-th series; after the last of the 8 colours, the first follows.

    Example:
        >>> series(0) == series(len(SERIES))
        True
    """
    return SERIES[number % len(SERIES)]


def style_variables() -> tuple[str, str]:
    """Return CSS that defines the charts' colours: one text for the light theme, one for the dark theme."""
    light = "".join(f"--{name}:{colour};" for colour, name in _VARIABLES.items())
    dark = "".join(f"--{name}:{c};" for name, c in zip(_NAMES, _DARK, strict=True))
    return light, dark


@dataclass(frozen=True)
class Tooltip:
    """Text shown when the mouse is over a point or rectangle of a chart; coordinates are in axes units.

    Attributes:
        x: horizontal coordinate of the point, or of the rectangle's left side.
        y: vertical coordinate of the point, or of the rectangle's lower side.
        text: the text that is shown.
        width: width of the rectangle; 0 for a point.
        height: height of the rectangle.
    """

    x: float
    y: float
    text: str
    width: float = 0.0
    height: float = 0.0


Panel = Callable[[Any], Sequence[Tooltip]]  # draws on matplotlib axes and returns its tooltips
_WIDTH, _HEIGHT = 4.3, 2.9  # of a chart, in inches
_A_ROW = 2  # charts in a row of a picture
_MOST_TOOLTIPS = 1200  # of a chart: a hundred bytes each


def draw(
    panels: Mapping[str, Panel], title: str = "", *, height: float = _HEIGHT
) -> tuple[Figure, list[Tooltip]]:
    """Draw several charts in one figure, two per row.

    Args:
        panels: panels by title, at least one.
        title: title above all charts.
        height: height of each chart in inches.

    Returns:
        The figure, and the tooltips of all charts.
    """
    from matplotlib import rc_context  # a second to import
    from matplotlib.figure import Figure

    columns = min(_A_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    tooltips: list[Tooltip] = []
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH * columns, height * rows), layout="constrained")
        places = [*figure.subplots(rows, columns, squeeze=False).flat]
        for (name, panel), axes in zip(panels.items(), places, strict=False):
            tooltips += panel(axes)
            axes.set_title(name)
        for axes in places[len(panels) :]:
            axes.remove()
        if title:
            figure.suptitle(title, fontsize=10)
    return figure, tooltips


# matplotlib's own type of these names differs between its versions
_STYLE: Any = {
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
}


def file_name(title: str) -> str:
    """Return a file name for a chart's title: lower case, with ``_`` for other characters.

    Example:
        >>> file_name("val/accuracy, at the end")
        'val_accuracy_at_the_end'
    """
    return re.sub(r"\W+", "_", title).strip("_").lower()


def write_chart(title: str, panel: Panel, path: Path) -> str:
    """Write a chart into a PNG and an SVG file, and return an SVG element for the HTML page.

    Returns:
        An ``<svg>`` element in the colours of the page, whose ids begin with the file's name.
    """
    figure, tooltips = draw({title: panel})
    svg = write_figure(figure, path)
    return inline(svg.replace("</svg>", f"{_as_svg(figure, tooltips)}</svg>"), path.name)


def write_figure(figure: Figure, path: Path) -> str:
    """Write a figure into a PNG and an SVG file with white background, reproducible byte for byte.

    Args:
        figure: the figure.
        path: path of both files, without an ending; its folder is made.

    Returns:
        The SVG on a transparent background, see `inline`.
    """
    from matplotlib import rc_context  # a second to import

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{path}.png", dpi=130, facecolor="white")
    figure.set_layout_engine("none")  # whose result is kept: it takes as long as a drawing
    drawn = io.StringIO()
    # text stays text; ids in the file would be random without a salt
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fl_lightning"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    start = svg.index(">", svg.index("<svg")) + 1  # a file may be shown on any background
    on_white = f'{svg[:start]}<rect width="100%" height="100%" fill="white"/>{svg[start:]}'
    Path(f"{path}.svg").write_text(on_white, encoding="utf-8")
    return svg


def _as_svg(figure: Figure, tooltips: Sequence[Tooltip]) -> str:
    """Return a chart's tooltips as an SVG group; at most 1,200, evenly chosen from all."""
    (axes, *_) = figure.axes
    points = 72 / figure.dpi
    height = figure.get_figheight() * 72
    shown = tooltips[:: max(1, -(-len(tooltips) // _MOST_TOOLTIPS))]
    corners = np.array([(s.x, s.y, s.x + s.width, s.y + s.height) for s in shown], float)
    placed = axes.transData.transform(corners.reshape(-1, 2)).reshape(-1, 4) * points
    parts = []
    for tooltip, (x, y, right, top) in zip(shown, placed.tolist(), strict=True):
        title = f"<title>{escape(tooltip.text)}</title>"
        if tooltip.width:
            left, upper = min(x, right), height - max(y, top)
            size = f'width="{abs(right - x):.1f}" height="{abs(top - y):.1f}"'
            parts.append(f'<rect x="{left:.1f}" y="{upper:.1f}" {size}>{title}</rect>')
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="5">{title}</circle>')
    return f'<g class="tooltips">{"".join(parts)}</g>'


def inline(svg: str, name: str) -> str:
    r"""Prepare an SVG for an HTML page: prefix its ids with a name, and replace colours by CSS variables.

    Example:
        >>> inline('<?xml?>\n<svg id="a"><use xlink:href="#a" style="stroke: #1b1c1e"/></svg>', "bytes")
        '<svg id="bytes-a"><use xlink:href="#bytes-a" style="stroke: var(--ink)"/></svg>'
    """
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(url\(#|href="#)([^)"]+)', rf"\1{name}-\2", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    return body.strip()
