"""Panels of charts with tooltips: curves with bands, distributions, maps, bars, points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.reports.charts import INK, SERIES, Panel, Tooltip, series

_MARKED = 40  # curves with more points than this have no markers
_FEWEST_OF_A_HISTOGRAM = 30  # values; of fewer, each is drawn as a dot
_FEWEST_BARS = 6  # different values; of fewer, no histogram is drawn
_MANY_BARS = 20  # from here on names and numbers are small
_MOST_LETTERS = 36  # of categories side by side; if they have more, they are turned


@dataclass(frozen=True)
class Line:
    """A curve of a chart, with an optional band of one standard deviation around it.

    Attributes:
        x: x coordinates, increasing, shape (n,).
        y: y coordinates, shape (n,); values that are not finite make gaps.
        label: text in the legend; empty for none.
        std: half of the band's width, shape (n,), or None for no band.
        colour: colour of the curve and the band.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    std: Sequence[float] | None = None
    colour: str = SERIES[0]

    def draw(self, axes: Any, of: str) -> Iterator[Tooltip]:
        """Draw the curve, and yield a tooltip for each finite value; ``of`` is the horizontal axis's name."""
        marker = "o" if len(self.x) <= _MARKED else ""
        label = self.label or "_"
        axes.plot(self.x, self.y, label=label, color=self.colour, marker=marker, markersize=3)
        if self.std is not None:
            middle, half = np.asarray(self.y, float), np.asarray(self.std, float)
            axes.fill_between(
                self.x, middle - half, middle + half, color=self.colour, alpha=0.18, linewidth=0
            )
        owner = f"{self.label}, " if self.label else ""
        for number, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            if math.isfinite(y):
                std = "" if self.std is None else f" ± {self.std[number]:.2g}"
                yield Tooltip(x, y, f"{owner}{of} {x:.6g}: {y:.4g}{std}")


def curves(
    lines: Sequence[Line], *, x: str = "round", y: str = "", from_zero: bool = False
) -> Panel:
    """Return a function that draws curves on matplotlib axes, with the axes' labels."""

    def panel(axes: Any) -> list[Tooltip]:
        tooltips = [tooltip for line in lines for tooltip in line.draw(axes, x)]
        axes.set(xlabel=x, ylabel=y)
        if x == "round":
            axes.xaxis.get_major_locator().set_params(integer=True)
        if from_zero:
            axes.set_ylim(bottom=0)
        if any(line.label for line in lines):
            axes.legend(loc="best")
        return tooltips

    return panel


def fan(x: Sequence[float], quantiles: npt.NDArray[np.float64]) -> Panel:
    """Return a chart of a distribution by round: its range, inner 80 % and median as bands and a curve.

    Args:
        x: rounds, shape (n,).
        quantiles: minimum, 10 %, median, 90 % and maximum of each round, shape (5, n).
    """

    def panel(axes: Any) -> list[Tooltip]:
        least, low, median, high, most = quantiles
        ranges = ((least, most, 0.14, "all clients"), (low, high, 0.26, "the inner 80 %"))
        for below, above, opacity, label in ranges:
            band = {"color": SERIES[0], "alpha": opacity, "linewidth": 0}
            axes.fill_between(x, below, above, label=label, **band)
        axes.plot(x, median, color=SERIES[0], label="median")
        axes.set(xlabel="round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best")
        columns = zip(x, median, least, most, strict=True)
        return [Tooltip(n, m, f"round {n}: {m:.4g}, {a:.4g} to {b:.4g}") for n, m, a, b in columns]

    return panel


def distribution(
    groups: Mapping[str, Mapping[str, float]], *, x: str = "", whole: bool = False
) -> Panel | None:
    """Return a chart of values, such as one per client: dots for fewer than 30 values, else a histogram.

    Args:
        groups: for each group, the values by owner, for example by client; non-finite ones are left out.
        x: label of the values.
        whole: whether values are integers.

    Returns:
        The panel; None without values, and for a histogram of fewer than 6 different values.
    """
    finite = {
        name: kept
        for name, values in groups.items()
        if (kept := {owner: float(v) for owner, v in values.items() if math.isfinite(v)})
    }
    if not finite:
        return None
    every = np.array([value for values in finite.values() for value in values.values()])
    is_few = max(map(len, finite.values())) < _FEWEST_OF_A_HISTOGRAM
    if (whole or not is_few) and len(np.unique(every)) < _FEWEST_BARS:
        return None
    first = next(iter(finite.values()))
    rows = {owner: row for row, owner in enumerate(sorted(first, key=lambda o: first[o]))}

    def panel(axes: Any) -> list[Tooltip]:
        tooltips: list[Tooltip] = []
        bins = _bins(every, whole=whole)
        for number, (name, values) in enumerate(finite.items()):
            look = {"color": series(number), "label": name if len(finite) > 1 else "_"}
            draw = _dots(axes, values, rows, look) if is_few else _bars(axes, values, bins, look)
            owner = f"{name}, " if len(finite) > 1 else ""
            tooltips += (replace(tooltip, text=f"{owner}{tooltip.text}") for tooltip in draw)
        axes.set(xlabel=x)
        if is_few:
            axes.grid(visible=True, axis="both")
            axes.margins(y=0.08)
            _name_rows(axes, [*rows])
        else:
            axes.set_ylabel("number")
            axes.yaxis.get_major_locator().set_params(integer=True)
            axes.margins(y=0.22 if len(finite) > 1 else None)  # room for the legend
        if len(finite) > 1:
            axes.legend(loc="best", ncols=1 if is_few else 2)
        return tooltips

    return panel


def _dots(
    axes: Any, values: Mapping[str, float], rows: Mapping[str, int], look: Mapping[str, Any]
) -> Iterator[Tooltip]:
    """Draw values as dots, one row per owner (such as a client), and yield the dots' tooltips."""
    known = [owner for owner in rows if owner in values]
    axes.plot([values[o] for o in known], [rows[o] for o in known], "o", **look)
    yield from (Tooltip(values[o], rows[o], f"{o}: {values[o]:.4g}") for o in known)


def _bars(
    axes: Any, values: Mapping[str, float], bins: npt.NDArray[np.float64], look: Mapping[str, Any]
) -> Iterator[Tooltip]:
    """Draw a histogram, and yield the tooltips of its bars."""
    counts, _ = np.histogram([*values.values()], bins)
    axes.bar(bins[:-1], counts, 0.92 * np.diff(bins), align="edge", alpha=0.55, **look)
    for a, b, n in zip(bins.tolist(), bins[1:].tolist(), counts.tolist(), strict=False):
        if n:
            yield Tooltip(a, 0, f"{a:.4g} to {b:.4g}: {n}", width=b - a, height=n)


def _name_rows(axes: Any, owners: Sequence[str]) -> None:
    """Label the rows of dots with their owners if there are few and names are short; else not."""
    names = [owner.removeprefix("client ") for owner in owners]
    fits = len(owners) <= 15 and max(map(len, names)) <= 6
    axes.set_yticks(*((range(len(owners)), names) if fits else ([],)))
    axes.set_ylabel("client" if owners[0].startswith("client ") else "")


def table_map(
    values: npt.NDArray[np.float64],
    *,
    x: str,
    y: str,
    columns: Sequence[str],
    rows: Sequence[str],
    legend: str = "",
    numbers: bool = False,
) -> Panel:
    """Return a chart of a table as coloured cells (a heat map); stronger colours are larger values.

    Args:
        values: shape (rows, columns), not negative unless ``numbers``; nan for no cell.
        x: label of the columns.
        y: label of the rows.
        columns: names of the columns.
        rows: names of the rows.
        legend: label of the colour scale; empty for no scale.
        numbers: whether to write each cell's value into it.
    """

    def panel(axes: Any) -> list[Tooltip]:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb  # a second

        finite = values[np.isfinite(values)]
        least = float(finite.min()) if numbers and finite.size else 0.0
        most = float(finite.max()) if finite.size else 1.0
        # on a square-root scale, one example is visible next to a cell with a hundred
        norm = PowerNorm(0.5, vmin=least, vmax=most if most > least else least + 1)
        full = to_rgb(SERIES[0])  # from transparent, for any background
        fading = LinearSegmentedColormap.from_list("fading", [(*full, 0.0), (*full, 1.0)])
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=fading, norm=norm)
        axes.grid(visible=False)
        axes.set(xlabel=x, ylabel=y)
        _ticks(axes, "x", columns)
        _ticks(axes, "y", rows)
        known = [(r, c, v) for (r, c), v in np.ndenumerate(values) if not math.isnan(v)]
        for row, column, value in known if numbers else ():
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=8)
        if legend:
            bar = axes.figure.colorbar(image, ax=axes, label=legend, pad=0.02)
            bar.outline.set_visible(False)
        return [
            Tooltip(c - 0.5, r - 0.5, f"{y} {rows[r]}, {x} {columns[c]}: {v:.4g}", 1.0, 1.0)
            for r, c, v in known
            if v or numbers
        ]

    return panel


def bars(
    names: Sequence[str],
    means: Sequence[float],
    whiskers: Sequence[float] | None = None,
    *,
    x: str = "",
    mark: float | None = None,
    most: float = math.inf,
) -> Panel:
    """Return a bar chart of means, each with its number and an optional standard deviation.

    Args:
        names: names of the bars, from top to bottom.
        means: lengths of the bars.
        whiskers: standard deviations; non-finite ones have no whisker. If None, all bars have one colour.
        x: label of the values.
        mark: value at which a dashed line is drawn; None for no line.
        most: largest possible value; the axis has no ticks beyond it.
    """
    stds = [math.nan] * len(names) if whiskers is None else whiskers

    def panel(axes: Any) -> list[Tooltip]:
        at = np.arange(len(names))
        colours = [series(0 if whiskers is None else n) for n in range(len(names))]
        errors = {"ecolor": INK, "elinewidth": 1.0, "capsize": 3}
        known = None if whiskers is None else np.nan_to_num(whiskers)
        drawn = axes.barh(at, means, xerr=known, color=colours, height=0.62, error_kw=errors)
        said = [
            f"{mean:.3g}" + (f" ± {std:.2g}" if math.isfinite(std) else "")
            for mean, std in zip(means, stds, strict=True)
        ]
        axes.bar_label(drawn, said, padding=4, fontsize=8 if len(names) < _MANY_BARS else 6)
        axes.margins(x=0.28, y=min(0.05, 1 / len(names)))  # room for the numbers
        if mark is not None:
            axes.axvline(mark, color=INK, linewidth=1, linestyle="--")
        axes.set(xlabel=x)
        if max(axes.get_xlim()) > most:
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most])
        axes.set_yticks(at, list(names), fontsize=8 if len(names) < _MANY_BARS else 6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.invert_yaxis()
        rows = zip(names, means, said, strict=True)
        return [
            Tooltip(min(0.0, mean), n - 0.31, f"{name}: {text}", abs(mean), 0.62)
            for n, (name, mean, text) in enumerate(rows)
            if mean and math.isfinite(mean)
        ]

    return panel


def points(
    x: Sequence[Any],
    y: Sequence[float],
    texts: Sequence[str],
    *,
    labels: tuple[str, str],
    steps: tuple[str, Sequence[tuple[float, float]]] | None = None,
    bounds: Mapping[str, float] | None = None,
    scale: str = "linear",
) -> Panel:
    """Return a scatter chart of points, with an optional step line through some of them.

    Args:
        x: horizontal coordinates: numbers, or names of categories.
        y: vertical coordinates.
        texts: tooltips of the points.
        labels: labels of both axes.
        steps: text in the legend, and corners of the line from left to right; None for no line.
        bounds: horizontal coordinates at which a dashed line is drawn, by text in the legend.
        scale: horizontal scale: ``linear``, ``log``, or ``large`` for numbers such as 250 k and 1.5 M.
    """
    are_numbers = all(type(value) in (int, float) for value in x)
    names = [] if are_numbers else list(dict.fromkeys(map(str, x)))
    at = [*x] if are_numbers else [names.index(str(value)) for value in x]

    def panel(axes: Any) -> list[Tooltip]:
        axes.scatter(at, y, s=14, color=series(7))
        if steps is not None:
            corners = np.array(steps[1]).reshape(-1, 2)
            line = {"color": series(0), "markersize": 5, "drawstyle": "steps-post"}
            axes.plot(corners[:, 0], corners[:, 1], "o-", label=steps[0], **line)
        for label, bound in (bounds or {}).items():
            axes.axvline(bound, color=series(1), linestyle="--", label=label)
        _scale(axes, scale, x, names)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        if steps is not None or bounds:
            axes.legend(loc="best")
        return [Tooltip(*point) for point in zip(at, y, texts, strict=True)]

    return panel


def _scale(axes: Any, scale: str, values: Sequence[Any], names: Sequence[str]) -> None:
    """Set the scale and ticks of the horizontal axis: for numbers, or for names of categories."""
    from matplotlib.ticker import EngFormatter  # a second to import

    if names:
        is_wide = sum(map(len, names)) > _MOST_LETTERS
        turned: dict[str, Any] = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"}
        shown = [_short(name) if is_wide else name for name in names]
        axes.set_xticks(range(len(names)), shown, **(turned if is_wide else {}))
        axes.margins(x=0.2)
    elif scale == "log":
        axes.set_xscale("log")
    elif scale == "large":
        axes.xaxis.set_major_formatter(EngFormatter())
    elif all(type(value) is int for value in values):
        axes.xaxis.get_major_locator().set_params(integer=True)


def _short(name: str) -> str:
    """Shorten an import path to its class name; other names, such as ``0.5``, are unchanged."""
    parts = name.split(".")
    return parts[-1] if all(part.isidentifier() for part in parts) else name


def _bins(values: npt.NDArray[np.float64], *, whole: bool) -> npt.NDArray[np.float64]:
    least, most = float(values.min()), float(values.max())
    if whole and most - least < 30:
        return np.arange(least, most + 2) - 0.5
    return np.linspace(least, most, int(min(30, max(8, 2 * math.sqrt(len(values))))) + 1)


def _ticks(axes: Any, which: str, names: Sequence[str]) -> None:
    """Write names at an axis of a heat map; only about ten if there are many rows or columns."""
    step = 1 if len(names) <= 12 else -(-len(names) // 10)
    at = range(0, len(names), step)
    getattr(axes, f"set_{which}ticks")(at, [names[n] for n in at])
