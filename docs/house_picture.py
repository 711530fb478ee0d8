"""Draws the rooms of the package from its imports: an arrow from who imports to what, a disk as large as its lines.

    python docs/house_picture.py FOLDER

writes ``house_light.svg`` and ``house_dark.svg``. Rooms are as high as the longest chain of imports below them.
"""

from __future__ import annotations

import ast
import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fl_lightning"
WIDTH, ROW, TOP = 900, 96, 60
COLOURS = {
    "light": {"ink": "#1f2328", "arrow": "#57606a", "disk": "#9ec5fe", "edge": "#0a58ca"},
    "dark": {"ink": "#e6edf3", "arrow": "#8b949e", "disk": "#1f4e8c", "edge": "#79b8ff"},
}


@dataclass
class House:
    """The rooms of a package.

    Attributes:
        lines: of Python in each room.
        arrows: numbers of files by (room, room that they import).
    """

    lines: Counter[str] = field(default_factory=Counter)
    arrows: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def read(cls, package: Path = PACKAGE) -> House:
        """Read all files of a package with rooms as folders."""
        house = cls()
        rooms = {path.parent.name for path in package.glob("*/__init__.py")}
        for room in rooms:
            for path in (package / room).rglob("*.py"):
                text = path.read_text()
                house.lines[room] += len(text.splitlines())
                names = {name.split(".")[1] for name in _imported(text, package.name)}
                house.arrows.update((room, other) for other in names & rooms - {room})
        return house

    def below(self, room: str) -> set[str]:
        """Rooms that a room imports, itself or through others."""
        direct = {other for one, other in self.arrows if one == room}
        return direct.union(*(self.below(other) for other in direct))

    def floor(self, room: str) -> int:
        """Length of the longest chain of imports below a room."""
        return max((1 + self.floor(other) for one, other in self.arrows if one == room), default=0)

    def is_needed(self, room: str, other: str) -> bool:
        """Whether no third room lies between the two."""
        between = {third for one, third in self.arrows if one == room} - {other}
        return not any(other in self.below(third) for third in between)


def _imported(text: str, package: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith(f"{package}.")}


def draw(house: House, colours: dict[str, str]) -> str:
    """Draw the house as SVG."""
    places = _places(house)
    height = max(y for _, y in places.values()) + TOP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" text-anchor="middle">'
        ),
        "<title>Rooms of fl_lightning and what they import</title>",
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerUnits="userSpaceOnUse" '
            f'markerHeight="9" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colours["arrow"]}"/>'
            "</marker></defs>"
        ),
    ]
    for (one, other), files in sorted(house.arrows.items()):
        if house.is_needed(one, other):
            parts.append(_arrow(house, places, one, other, files, colours["arrow"]))
    for room, (x, y) in sorted(places.items()):
        parts += [
            (
                f'<circle cx="{x}" cy="{y}" r="{_radius(house, room):.0f}" fill="{colours["disk"]}" '
                f'stroke="{colours["edge"]}"/>'
            ),
            f'<text x="{x}" y="{y}" font-size="14" fill="{colours["ink"]}">{room}</text>',
            (
                f'<text x="{x}" y="{y + 15}" font-size="11" fill="{colours["ink"]}">'
                f"{house.lines[room]:,}</text>"
            ),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _radius(house: House, room: str) -> float:
    return 24 + 24 * math.sqrt(house.lines[room] / max(house.lines.values()))


def _places(house: House) -> dict[str, tuple[int, int]]:
    """Centre of every room in pixels: the highest floor on top, a floor's rooms side by side."""
    rooms = sorted(house.lines, key=lambda room: (house.floor(room), room))
    top = house.floor(rooms[-1])
    places = {}
    for floor, group in groupby(rooms, key=house.floor):
        side_by_side = [*group]
        for number, room in enumerate(side_by_side):
            shift = 60 if floor % 2 else -60  # so that arrows pass beside rooms
            x = round(WIDTH * (number + 0.5) / len(side_by_side)) + shift
            places[room] = x, TOP + ROW * (top - floor)
    return places


def _arrow(
    house: House,
    places: dict[str, tuple[int, int]],
    one: str,
    other: str,
    files: int,
    colour: str,
) -> str:
    (x0, y0), (x1, y1) = places[one], places[other]
    length = math.hypot(x1 - x0, y1 - y0)
    start, end = _radius(house, one) / length, 1 - (_radius(house, other) + 4) / length
    along = [round(a + (b - a) * t) for t in (start, end) for a, b in ((x0, x1), (y0, y1))]
    width = 0.8 + min(3, files / 12)
    return (
        f'<line x1="{along[0]}" y1="{along[1]}" x2="{along[2]}" y2="{along[3]}" stroke="{colour}" '
        f'stroke-width="{width:.1f}" marker-end="url(#tip)"/>'
    )


def draw_house(folder: Path) -> None:
    """Write the picture for both backgrounds into a folder."""
    house = House.read()
    for background, colours in COLOURS.items():
        (folder / f"house_{background}.svg").write_text(draw(house, colours))


if __name__ == "__main__":
    draw_house(Path(sys.argv[1]))
