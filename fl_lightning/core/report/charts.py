"""Charts of a report: matplotlib panels in one style, as PNG and SVG files and inline in a page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.core.report.colours import INK, QUIET, RULE, as_variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Panel = Callable[[Any], None]  # draws on axes
_WIDTH, _HEIGHT = 4.3, 2.9  # inches of a panel
_A_ROW = 2  # panels


@dataclass(frozen=True)
class Chart:
    """A figure of a report.

    Attributes:
        name: name of its files, without an ending.
        title: title above the figure.
        caption: one or two sentences below the figure.
        panels: panels from left to right, two per row.
        is_tall: whether panels are taller, for maps with a row for each of many clients.
        names_are_long: whether to make room for long names, which takes twice as long to draw.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    is_tall: bool = False
    names_are_long: bool = False

    def figure(self) -> Figure:
        """Draw the figure, without its title, on a transparent background."""
        from matplotlib import rc_context  # a second to import
        from matplotlib.figure import Figure

        columns = min(_A_ROW, len(self.panels))
        rows = math.ceil(len(self.panels) / columns)
        height = _HEIGHT * (1.5 if self.is_tall else 1) * rows
        with rc_context(_STYLE):
            figure = Figure(
                figsize=(_WIDTH * _A_ROW, height),
                layout="constrained" if self.names_are_long else None,
            )
            places = [*figure.subplots(rows, columns, squeeze=False).flat]
            for panel, axes in zip(self.panels, places, strict=False):
                panel(axes)
            for axes in places[len(self.panels) :]:
                axes.remove()
            if not self.names_are_long:  # margins in inches
                width = _WIDTH * _A_ROW
                figure.subplots_adjust(
                    left=0.62 / width,
                    right=1 - 0.12 / width,
                    bottom=0.46 / height,
                    top=1 - 0.28 / height,
                    wspace=0.2,
                    hspace=0.34,
                )
        return figure


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
    "svg.fonttype": "none",  # text stays text
}


_NAMES = re.compile(r'\bid="([^"]+)"')
_USES = re.compile(r'(url\(#|href="#)([^)"]+)')


def write_chart(chart: Chart, folder: Path) -> str:
    """Write a chart as ``<name>.png`` and ``<name>.svg``, and return it for a page.

    Args:
        chart: the chart.
        folder: folder of the files; created if missing.

    Returns:
        An ``<svg>`` element in the colours of the page, with ids that no other chart has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure = chart.figure()
    figure.savefig(folder / f"{chart.name}.png", dpi=130, facecolor="white")
    drawn = io.StringIO()
    # without a date, equal charts give equal files
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    (folder / f"{chart.name}.svg").write_text(_on_white(svg), encoding="utf-8")
    return inline(svg, chart.name)


def inline(svg: str, name: str) -> str:
    r"""Prepare an SVG drawing for a page: unique ids, and colours of the page.

    Example:
        >>> inline('<?xml?>\n<svg id="a"><use xlink:href="#a"/></svg>', "bytes")
        '<svg id="bytes-a"><use xlink:href="#bytes-a"/></svg>'
    """
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    body = _NAMES.sub(lambda found: f'id="{name}-{found[1]}"', body)
    body = _USES.sub(lambda found: f"{found[1]}{name}-{found[2]}", body)
    return as_variables(body).strip()


def _on_white(svg: str) -> str:
    """Add a white background: a file may be shown on any background."""
    start = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[:start]}<rect width="100%" height="100%" fill="white"/>{svg[start:]}'
