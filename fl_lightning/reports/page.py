"""A report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fl_lightning.reports.charts import style_variables


@dataclass
class Page:
    """An HTML page, built part by part.

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
        """Add the most important facts: pairs of a name and a short value."""
        inner = "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts
        )
        self._parts.append(f'<div class="tiles">{inner}</div>')

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def drawing(self, svg: str, title: str, caption: str) -> None:
        """Add a chart, an ``<svg>`` element."""
        self._parts.append(
            f'<figure role="img" aria-label="{escape(title)}"><h3>{escape(title)}</h3>'
            f'<div class="chart">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'
        )

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
        """Add preformatted text in a fold with this label."""
        self._parts.append(_folded(fold, f"<pre>{escape(text)}</pre>"))

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
main{max-width:1000px;margin:0 auto;padding:2rem 1rem 4rem}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-bottom:.3rem;border-bottom:1px solid var(--rule)}
h3{font-size:1rem;margin:0 0 .4rem}
.under,figcaption,.tiles span{color:var(--quiet)}
.under{margin:.2rem 0 1.2rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.7rem}
.tiles div,figure,details{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles div{padding:.6rem .8rem}
.tiles span{display:block;font-size:.8rem}
.tiles b{font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums}
figure{margin:1rem 0;padding:1rem}
figcaption{font-size:.85rem;margin-top:.4rem}
.chart{overflow-x:auto}
.chart svg{display:block;width:100%;min-width:34rem;height:auto}
.chart svg text{font-family:inherit!important}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.3rem .7rem;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--quiet);font-weight:600}
details{margin:.8rem 0;padding:.6rem .9rem}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:.8rem}
"""
