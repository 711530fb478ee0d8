"""A report as one self-contained HTML file: no script, no font, no network. Its template is ``page.html``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core.processes import write_whole
from fl_lightning.reports.charts import Panel, file_name, style_variables, write_chart

FRAGMENTS = "sections"  # subfolder of a run, with HTML that other callbacks add to the report


@dataclass
class Page:
    """A self-contained HTML page: headings, texts, charts and tables are appended one by one.

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
        """Append tiles (boxes with a big number) for the most important facts: pairs of name and short value."""
        self._add("tiles", facts)

    def heading(self, text: str) -> None:
        """Append a heading to the page."""
        self._add("heading", text)

    def text(self, text: str) -> None:
        """Append a paragraph of text to the page."""
        self._add("text", text)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Append a list of named facts to the page, one line per fact."""
        self._add("facts", facts)

    def charts(self, panels: Mapping[str, Panel], folder: Path, prefix: str = "") -> None:
        """Append a chart per panel, and write it into PNG and SVG files; equal file names get a number."""
        drawn, numbers = [], Counter[str]()
        for title, panel in panels.items():
            name = file_name(title)
            numbers[name] += 1
            number = f"_{numbers[name]}" if numbers[name] > 1 else ""
            drawn.append((title, write_chart(title, panel, folder / f"{prefix}{name}{number}")))
        self._add("charts", drawn)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], fold: str = "") -> None:
        """Append a table to the page.

        Args:
            head: names of the columns.
            rows: cells, as text.
            fold: label of a fold that hides the table until it is clicked; empty for no fold.
        """
        self._add("table", head, rows, fold)

    def verbatim(self, text: str, fold: str) -> None:
        """Append preformatted text, hidden under the label ``fold`` until that is clicked."""
        self._add("verbatim", text, fold)

    def include(self, fragment: str) -> None:
        """Append raw HTML to the page, such as the `fragment` of another page."""
        self._parts.append(fragment)

    def fragment(self) -> str:
        """Return the HTML of the page's content, without title and style sheet."""
        return "".join(self._parts)

    def html(self) -> str:
        """Return the whole page as HTML."""
        light, dark = style_variables()
        known = {"title": self.title, "subtitle": self.subtitle, "parts": self.fragment()}
        return str(_template().render(**known, light=light, dark=dark))

    def write(self, path: Path) -> None:
        """Write the page into an HTML file."""
        write_whole(path, self.html())

    def _add(self, macro: str, *content: Any) -> None:
        self._parts.append(str(getattr(_template().module, macro)(*content)))


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader  # slow to import

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    return environment.get_template("page.html")
