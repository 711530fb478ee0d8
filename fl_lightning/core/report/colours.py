"""Colours of a report, for light and dark screens.

Charts are drawn in the light colours. In a page, each colour becomes a variable of the style sheet, so
that one drawing serves both.
"""

from __future__ import annotations

from typing import Any

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
