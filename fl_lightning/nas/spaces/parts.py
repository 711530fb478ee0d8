"""Sizes that are chosen for the parts of a network, and how strings tell them.

Parts are joined by ``|``, a part's own sizes stand before ``:``, its blocks are joined by ``-``, a size is
its letter and number: ``w0.5:k7e6-k3e4|w1:k5e3``. The number of blocks is the depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.reader import Reader

Number = int | float


@dataclass(frozen=True)
class Size:
    """A size to choose.

    Attributes:
        name: e.g. ``"kernel"``.
        letter: that stands before its number in strings.
        options: rising.
    """

    name: str
    letter: str
    options: tuple[Number, ...]

    def __post_init__(self) -> None:
        if not self.options or list(self.options) != sorted(set(self.options)):
            raise ConfigurationError(
                f"the options of {self.name} must be different numbers that rise, got {self.options}"
            )
        if self.options[0] <= 0:
            raise ConfigurationError(f"{self.name} must be above 0, got {self.options[0]:g}")


@dataclass(frozen=True)
class Part:
    """A stage: what there is to choose in it.

    Attributes:
        name: e.g. ``"stage 1"``.
        own: sizes of the whole stage.
        depth: how many blocks.
        block: sizes of each block.
    """

    name: str
    own: tuple[Size, ...]
    depth: Size
    block: tuple[Size, ...]

    @property
    def sizes(self) -> tuple[tuple[str, Size], ...]:
        """All there is to choose, with the names of decisions, in their order."""
        head = [*self.own, self.depth]
        blocks = range(1, int(self.depth.options[-1]) + 1)
        inside = [(f"block {number} {size.name}", size) for number in blocks for size in self.block]
        named = [*((size.name, size) for size in head), *inside]
        return tuple((f"{self.name} {name}", size) for name, size in named)


@dataclass(frozen=True)
class PartSizes:
    """What is chosen in a stage.

    Attributes:
        own: of the whole stage.
        blocks: of each of the blocks that there are.
    """

    own: tuple[Number, ...]
    blocks: tuple[tuple[Number, ...], ...]


def most_blocks(part: Part) -> int:
    """Return how many blocks a part has at most."""
    return int(part.depth.options[-1])


def depths_of(part: Part) -> Iterator[int]:
    """Return the numbers of blocks to choose from."""
    return (int(depth) for depth in part.depth.options)


def part_text(part: Part, chosen: PartSizes) -> str:
    """Return the string of what is chosen in a part."""
    own = _sizes_text(part.own, chosen.own)
    blocks = "-".join(_sizes_text(part.block, block) for block in chosen.blocks)
    return f"{own}:{blocks}" if own else blocks


def _sizes_text(sizes: Sequence[Size], numbers: Sequence[Number]) -> str:
    pairs = zip(sizes, numbers, strict=True)
    return "".join(f"{size.letter}{number:g}" for size, number in pairs)


def read_part(reader: Reader, part: Part) -> list[int]:
    """Pass a part; return the choices of all its decisions."""
    own = [_read_size(reader, part.name, size) for size in part.own]
    if own:
        reader.expect(":")
    blocks = [_read_block(reader, part)]
    while len(blocks) < most_blocks(part) and reader.text.startswith("-", reader.place):
        reader.expect("-")
        blocks.append(_read_block(reader, part))
    depths = list(depths_of(part))
    if len(blocks) not in depths:
        allowed = ", ".join(map(str, depths))
        reader.refuse(f"{part.name} has {len(blocks)} blocks so far; allowed: {allowed}")
    idle = [0] * ((most_blocks(part) - len(blocks)) * len(part.block))
    return [*own, depths.index(len(blocks)), *(c for block in blocks for c in block), *idle]


def _read_block(reader: Reader, part: Part) -> list[int]:
    return [_read_size(reader, part.name, size) for size in part.block]


def _read_size(reader: Reader, part: str, size: Size) -> int:
    """Pass a letter and a number; the longest that fits, so that 3.5 is not read as 3."""
    reader.expect(size.letter)
    options = [f"{option:g}" for option in size.options]
    for option in sorted(options, key=len, reverse=True):
        if reader.text.startswith(option, reader.place):
            reader.expect(option)
            return options.index(option)
    return reader.refuse(f"expected the {size.name} of a block of {part}: {', '.join(options)}")
