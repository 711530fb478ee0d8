"""A chart as files, PNG and SVG, and as a part of a page."""

from __future__ import annotations

import io
import re
from pathlib import Path

from fl_lightning.core.report.charts import Chart
from fl_lightning.core.report.colours import as_variables

_NAMES = re.compile(r'\bid="([^"]+)"')
_USES = re.compile(r'(url\(#|href="#)([^)"]+)')


def write_chart(chart: Chart, folder: Path) -> str:
    """Write a chart as ``<name>.png`` and ``<name>.svg``; return it as a part of a page.

    Args:
        chart: what is drawn.
        folder: of the files; made if missing.

    Returns:
        An ``<svg>`` element in the colours of the page around it, whose names no other chart has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure = chart.figure()
    figure.savefig(folder / f"{chart.name}.png", dpi=130, facecolor="white")
    drawn = io.StringIO()
    # without a date the same numbers make the same file
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    (folder / f"{chart.name}.svg").write_text(_on_white(svg), encoding="utf-8")
    return inline(svg, chart.name)


def inline(svg: str, name: str) -> str:
    r"""Return a drawing as a part of a page.

    Example:
        >>> inline('<?xml?>\n<svg id="a"><use xlink:href="#a"/></svg>', "bytes")
        '<svg id="bytes-a"><use xlink:href="#bytes-a"/></svg>'
    """
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    body = _NAMES.sub(lambda found: f'id="{name}-{found[1]}"', body)
    body = _USES.sub(lambda found: f"{found[1]}{name}-{found[2]}", body)
    return as_variables(body).strip()


def _on_white(svg: str) -> str:
    """Return a drawing with a white ground: a file may be shown on any."""
    start = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[:start]}<rect width="100%" height="100%" fill="white"/>{svg[start:]}'
