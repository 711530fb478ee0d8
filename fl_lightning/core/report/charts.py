"""A chart of a report: panels on axes of matplotlib, in one style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_lightning.core.report.colours import INK, QUIET, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel = Callable[[Any], None]  # draws on axes
_WIDTH, _HEIGHT = 4.3, 2.9  # inches of a panel
_A_ROW = 2  # panels


@dataclass(frozen=True)
class Chart:
    """A figure of a report: panels, and what they say.

    Attributes:
        name: of its files.
        title: over it.
        caption: below it, a sentence or two.
        panels: from left to right, two in a row.
        is_tall: for maps, which have a row for each of many clients.
        names_are_long: whether panels must make room for names, which takes twice as long to draw.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    is_tall: bool = False
    names_are_long: bool = False

    def figure(self) -> Figure:
        """Return the drawing, without the title, on a transparent ground."""
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
