"""A report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fl_lightning.reports.charts import Chart, style_variables, write_chart

FRAGMENTS = "sections"  # folder of a run, with parts that other callbacks add to the report


@dataclass
class Page:
    """A self-contained HTML page, to which parts are added one by one.

    Attributes:
        title: title of the page.
        subtitle: line below the title.

    Example:
        >>> page = Page("A run", "of two rounds")
        >>> page.tiles([("rounds", "2")])
        >>> "<b>2</b>" in page.html()
        True
    """

    title: str
    subtitle: str = ""
    _parts: list[str] = field(default_factory=list)

    def tiles(self, facts: Sequence[tuple[str, str]]) -> None:
        """Add tiles with the most important facts: pairs of a name and a short value."""
        inner = "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts
        )
        self._parts.append(f'<div class="tiles">{inner}</div>')

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph of explanation."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def facts(self, facts: Mapping[str, str]) -> None:
        """Add a list of facts by name, a line each."""
        rows = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts.items())
        self._parts.append(f'<dl class="facts">{rows}</dl>')

    def charts(self, charts: Sequence[Chart], folder: Path) -> None:
        """Add charts, each in a cell, and write their PNG and SVG files into a folder."""
        cells = (
            f'<div role="img" aria-label="{escape(chart.title)}">{write_chart(chart, folder)}</div>'
            for chart in charts
        )
        self._parts.append(f'<div class="charts">{"".join(cells)}</div>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], fold: str = "") -> None:
        """Add a table.

        Args:
            head: names of the columns.
            rows: cells, as text.
            fold: label of a fold that hides the table until it is clicked; empty for no fold.
        """
        top = "".join(f"<th>{escape(name)}</th>" for name in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        table = f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
        self._parts.append(_folded(fold, table) if fold else table)

    def verbatim(self, text: str, fold: str) -> None:
        """Add preformatted text in a fold with a label."""
        self._parts.append(_folded(fold, f"<pre>{escape(text)}</pre>"))

    def include(self, fragment: str) -> None:
        """Add HTML, e.g. the `fragment` of another page."""
        self._parts.append(fragment)

    def fragment(self) -> str:
        """Return the HTML of all parts, without title and style."""
        return "".join(self._parts)

    def html(self) -> str:
        """Return the HTML of the page."""
        light, dark = style_variables()
        style = _STYLE.replace("LIGHT", light).replace("DARK", dark)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{style}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="under">{escape(self.subtitle)}</p>'
            f"{''.join(self._parts)}</main></body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        part = path.with_suffix(".part")
        part.write_text(self.html(), encoding="utf-8")
        part.replace(path)


def _folded(name: str, inner: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{inner}</details>"


_STYLE = """
:root{LIGHT--ground:#fbfbfc;--card:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{DARK--ground:#14161a;--card:#1c1f24}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1060px;margin:0 auto;padding:1.6rem 1rem 4rem}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-bottom:.3rem;border-bottom:1px solid var(--rule)}
p{margin:.4rem 0}
.under,.note,.tiles span,dt{color:var(--quiet)}
.under{margin:.2rem 0 1rem;overflow-wrap:anywhere}
.note{font-size:.88rem;max-width:70ch}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0 0 1.2rem;
font-size:.88rem}
dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.7rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:.7rem;
align-items:start;margin:.7rem 0}
.tiles div,.charts>div,details{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles div{padding:.5rem .8rem}
.tiles span{display:block;font-size:.8rem}
.tiles b{font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts>div{padding:.6rem}
.charts svg{display:block;width:100%;height:auto}
.charts svg text{font-family:inherit!important}
.tooltips *{fill:transparent}
.tooltips :hover{fill:var(--ink);fill-opacity:.25}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.3rem .7rem;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--quiet);font-weight:600}
details{margin:.8rem 0;padding:.6rem .9rem}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:.8rem}
@media(max-width:30rem){.facts{grid-template-columns:1fr;gap:0}dd{margin-bottom:.35rem}}
"""
