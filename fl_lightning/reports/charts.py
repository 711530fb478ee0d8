"""Charts of a report: matplotlib panels in one style, as PNG and SVG files and inline in a page.

Charts are drawn in the colours of light screens. In a page, each colour becomes a variable of the style
sheet, so that one drawing serves dark screens too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


INK, QUIET, RULE = "#1b1c1e", "#5e6368", "#d9dce0"
LIGHT = {INK: "ink", QUIET: "quiet", RULE: "rule"}
SERIES = (
    *("#2a6fc9", "#c2570c", "#1b8a5a", "#8a4fc4"),
    *("#a8780a", "#c43a6b", "#0e8291", "#6b6f75"),
)
_DARK = {
    "ink": "#eceef0",
    "quiet": "#a3a9b0",
    "rule": "#3a3f46",
    **dict(
        zip(
            (f"series-{n}" for n in range(len(SERIES))),
            (
                *("#6aa5f2", "#f0935a", "#4cc08a", "#b98de8"),
                *("#dcb04a", "#ee7ba2", "#4fc0cf", "#a8adb3"),
            ),
            strict=True,
        )
    ),
}
NAMES = LIGHT | {colour: f"series-{n}" for n, colour in enumerate(SERIES)}


def series(number: int) -> str:
    """Colour of the n-th series; colours repeat.

    Example:
        >>> series(0) == series(len(SERIES))
        True
    """
    return SERIES[number % len(SERIES)]


def as_variables(svg: str) -> str:
    """Replace the colours of a drawing by variables of the page's style sheet.

    Example:
        >>> as_variables('<path style="stroke: #1b1c1e"/>')
        '<path style="stroke: var(--ink)"/>'
    """
    for colour, name in NAMES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def style_variables() -> tuple[str, str]:
    """CSS definitions of the colour variables: for light, and for dark screens."""
    light = "".join(f"--{name}:{colour};" for colour, name in NAMES.items())
    return light, "".join(f"--{name}:{colour};" for name, colour in _DARK.items())


def fading(colour: str) -> Any:
    """Return a colour map from transparent to a colour, for any background."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb  # a second to import

    full = to_rgb(colour)
    return LinearSegmentedColormap.from_list("fading", [(*full, 0.0), (*full, 1.0)])


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


_MARKED = 40  # curves with more points than this have no markers


@dataclass(frozen=True)
class Line:
    """A curve with an optional band around it.

    Attributes:
        x: x coordinates, increasing, shape (n,).
        y: y coordinates, shape (n,); values that are not finite make gaps.
        label: text in the legend; empty for none.
        std: half of the band's width, shape (n,), or None for no band.
        colour: colour of the curve and the band.
        is_dashed: whether the curve is dashed.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    std: Sequence[float] | None = None
    colour: str = SERIES[0]
    is_dashed: bool = False

    def draw(self, axes: Any) -> None:
        """Draw the curve on matplotlib axes."""
        marker = "o" if len(self.x) <= _MARKED and not self.is_dashed else ""
        axes.plot(
            self.x,
            self.y,
            label=self.label or "_",
            color=self.colour,
            linestyle="--" if self.is_dashed else "-",
            marker=marker,
            markersize=3,
        )
        if self.std is not None:
            middle, half = np.asarray(self.y, float), np.asarray(self.std, float)
            axes.fill_between(
                self.x, middle - half, middle + half, color=self.colour, alpha=0.18, linewidth=0
            )


def curves(
    title: str, lines: Sequence[Line], *, x: str = "round", y: str = "", from_zero: bool = False
) -> Panel:
    """Return a panel of curves."""

    def draw(axes: Any) -> None:
        for line in lines:
            line.draw(axes)
        axes.set(title=title, xlabel=x, ylabel=y)
        if x == "round":
            axes.xaxis.get_major_locator().set_params(integer=True)
        if from_zero:
            axes.set_ylim(bottom=0)
        if any(line.label for line in lines):
            axes.legend(loc="best")

    return draw


def fan(title: str, x: Sequence[float], quantiles: Mapping[str, Sequence[float]]) -> Panel:
    """Return a panel of a distribution over rounds: its range, its inner 80 % and its median.

    Args:
        title: title of the panel.
        x: rounds.
        quantiles: ``min``, ``low``, ``median``, ``high``, ``max``, with one value per round each.
    """

    def draw(axes: Any) -> None:
        q = quantiles
        for below, above, opacity, label in (
            ("min", "max", 0.14, "all clients"),
            ("low", "high", 0.26, "the inner 80 %"),
        ):
            axes.fill_between(
                x, q[below], q[above], color=SERIES[0], alpha=opacity, linewidth=0, label=label
            )
        axes.plot(x, q["median"], color=SERIES[0], label="median")
        axes.set(title=title, xlabel="round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best")

    return draw


def histogram(
    title: str,
    groups: Mapping[str, Sequence[float]],
    *,
    x: str = "",
    y: str = "clients",
    whole: bool = False,
) -> Panel:
    """Return a panel of one or several histograms over the same bins, with their means as lines.

    Args:
        title: title of the panel.
        groups: values by name; those that are not finite are left out.
        x: label of the values.
        y: label of the counts.
        whole: whether values are integers.
    """
    finite = {
        name: kept for name, values in groups.items() if len(kept := _finite(values))
    }  # fmt: skip

    def draw(axes: Any) -> None:
        axes.set(title=title, xlabel=x, ylabel=y)
        if not finite:
            return
        bins = _bins(np.concatenate([*finite.values()]), whole=whole)
        for number, (name, values) in enumerate(finite.items()):
            colour = SERIES[number % len(SERIES)]
            label = f"{name}, " if len(finite) > 1 else ""
            axes.hist(values, bins=bins, color=colour, alpha=0.55, rwidth=0.92)
            mean = float(values.mean())
            told = f"{label}mean {mean:.4g}"
            axes.axvline(
                mean, ymax=0.82, color=colour, linestyle="--", label=told
            )  # below the legend
        if whole:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.margins(y=0.22)  # room for the legend
        axes.legend(loc="upper right", ncols=2)

    return draw


def table_map(
    title: str,
    values: npt.NDArray[np.float64],
    *,
    x: str,
    y: str,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    legend: str = "",
    numbers: bool = False,
) -> Panel:
    """Return a panel with a map of cells; darker cells have larger values.

    Args:
        title: title of the panel.
        values: shape (rows, columns), not negative unless ``numbers``; nan for no cell.
        x: label of the columns.
        y: label of the rows.
        columns: names of the columns.
        rows: names of the rows.
        legend: label of the colour scale; empty for no scale.
        numbers: whether to write each cell's value into it.
    """

    def draw(axes: Any) -> None:
        from matplotlib.colors import PowerNorm  # a second to import

        least = float(np.nanmin(values)) if numbers else 0.0
        most = float(np.nanmax(values)) if values.size else 1.0
        # the square root keeps one example apart from none where another cell has a hundred
        norm = PowerNorm(0.5, vmin=least, vmax=most if most > least else least + 1)
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap=fading(SERIES[0]), norm=norm
        )
        axes.grid(visible=False)
        axes.set(title=title, xlabel=x, ylabel=y)
        _ticks(axes, "x", columns, values.shape[1])
        _ticks(axes, "y", rows, values.shape[0])
        if numbers:
            for (row, column), value in np.ndenumerate(values):
                text = "" if math.isnan(value) else f"{value:.3g}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8)
        if legend:
            bar = axes.figure.colorbar(image, ax=axes, label=legend, pad=0.02)
            bar.outline.set_visible(False)

    return draw


def bars(
    title: str, names: Sequence[str], means: Sequence[float], whiskers: Sequence[float]
) -> Panel:
    """Return a panel with one bar per name, and a whisker for its standard deviation if finite."""

    def draw(axes: Any) -> None:
        at = np.arange(len(names))
        colours = [SERIES[n % len(SERIES)] for n in range(len(names))]
        errors = {"ecolor": INK, "elinewidth": 1.0, "capsize": 3}
        axes.barh(
            at, means, xerr=np.nan_to_num(whiskers), color=colours, height=0.62, error_kw=errors
        )
        axes.set_yticks(at, list(names))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.invert_yaxis()
        axes.set(title=title)

    return draw


def _finite(values: Sequence[float]) -> npt.NDArray[np.float64]:
    numbers = np.asarray(values, float)
    kept: npt.NDArray[np.float64] = numbers[np.isfinite(numbers)]
    return kept


def _bins(values: npt.NDArray[np.float64], *, whole: bool) -> npt.NDArray[np.float64]:
    least, most = float(values.min()), float(values.max())
    if whole and most - least < 30:
        return np.arange(least, most + 2) - 0.5
    if most <= least:  # all the same
        return np.linspace(least - 0.5, least + 0.5, 12)
    return np.linspace(least, most, int(min(30, max(6, 2 * math.sqrt(len(values))))) + 1)


def _ticks(axes: Any, which: str, names: Sequence[str], count: int) -> None:
    """Label the rows or columns; about ten of them if there are many."""
    if not len(names):
        return
    step = 1 if count <= 12 else -(-count // 10)
    at = range(0, count, step)
    getattr(axes, f"set_{which}ticks")(at, [names[n] for n in at])
