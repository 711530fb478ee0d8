"""Panels of charts: curves with bands, distributions, histograms, maps, bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.core.report.charts import Panel
from fl_lightning.core.report.colours import INK, SERIES, fading

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
