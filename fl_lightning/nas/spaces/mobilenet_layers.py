"""MobileNet space with one operation per layer, for searches by a `Supernet`.

Each layer has one of seven operations: an inverted residual of kernel 3, 5 or 7 and expansion 3 or 6, or a
skip, which makes the network shallower. All stages have the largest depth.
Sources: Cai et al. 2019, ICLR (ProxylessNAS), section 4.2; Wu et al. 2019, CVPR (FBNet), table 2.
Differs: the first layer of a stage can be skipped as well, so that every layer has the same operations. There the
skip is a 1×1 convolution with batch norm, because image size and channels change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import ClassVar, final

from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import Candidate, CellNetwork, MakeEdge, Row, RowSpace
from fl_lightning.nas.spaces.elastic import multiple_of_8
from fl_lightning.nas.spaces.mobilenet import Block, InvertedResidual, MobileNet, small_mobilenet
from fl_lightning.nas.spaces.space import Decision
from fl_lightning.nas.spaces.stages import blocks_of, made

BLOCKS = tuple(product((3, 5, 7), (3, 6)))
SKIP = "skip_connect"


@final
@dataclass(frozen=True)
class MobileNetLayers(RowSpace):
    """MobileNet search space in which each layer chooses its own operation (kernel and expansion, or skip).

    Attributes:
        sizes: space whose widths, strides, activations and largest depth are used; `small_mobilenet`, for
            images of 32 pixels, if None.

    Example:
        >>> space = MobileNetLayers()
        >>> space.num_rows, len(space.operations), f"{space.size:.3g}"
        (20, 7, '7.98e+16')
        >>> str(space.architecture([6] * 20)).split("|")[0]
        'skip_connect-skip_connect-skip_connect-skip_connect'
    """

    name: ClassVar[str] = "mobilenet_layers"
    operations: ClassVar[tuple[str, ...]] = (*(f"k{k}e{e}" for k, e in BLOCKS), SKIP)
    none: ClassVar[int] = -1  # no layer can be left out: it would break the chain

    sizes: MobileNet | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", self.sizes or small_mobilenet())
        if self.shapes.resolutions:
            raise ConfigurationError(
                f"{self.name} chooses layers, not image sizes: leave sizes.resolutions empty"
            )

    @property
    def shapes(self) -> MobileNet:
        """MobileNet space that gives widths, strides and activations: `sizes`, or its default."""
        assert self.sizes is not None, "set at the start"
        return self.sizes

    @property
    def depth(self) -> int:
        """Number of layers in each stage."""
        return self.shapes.depths[-1]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One edge (row of α) per layer, stage by stage."""
        stages = range(1, len(self.shapes.strides))
        return tuple(
            Row(f"stage {stage}", layer, layer + 1)
            for stage in stages
            for layer in range(self.depth)
        )

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the space: one choice of an operation per layer."""
        names = (f"{row.cell} layer {row.target}" for row in self.rows)
        return tuple(Decision(name, self.operations) for name in names)

    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the names of a stage's nodes: input, 1, 2, …, output."""
        return ("input", *map(str, range(1, self.depth)), "output")

    @property
    def separators(self) -> tuple[str, ...]:
        """Separators in architecture strings: ``|`` between stages, ``-`` between layers of a stage."""
        return ("", *("-" if row % self.depth else "|" for row in range(1, self.num_rows)), "")

    def network(
        self,
        make_edge: MakeEdge,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int | None = None,
        cells: int | None = None,
        affine: bool = True,
    ) -> CellNetwork:
        """Build a network of the space, whose layers `make_edge` makes.

        Args:
            make_edge: function that makes a layer.
            num_classes: number of classes.
            in_channels: channels of the images.
            channels: channels of the stem, a multiple of 8; all widths are scaled with them. Those of
                `sizes` if None.
            cells: `depth` or None, because the number of layers per stage is fixed.
            affine: whether batch norms of candidates scale and shift.

        Raises:
            ConfigurationError: if ``cells`` is another number, or ``channels`` is no multiple of 8.
        """
        if channels is not None and channels % 8:
            raise ConfigurationError(
                f"channels must be a multiple of 8 for {self.name}, got {channels}"
            )
        if cells not in (None, self.depth):
            raise ConfigurationError(
                f"cells must be {self.depth} for {self.name}, its number of layers per stage, got {cells}: set cells to "
                f"{self.depth} or null, or change sizes.depths of the space"
            )
        sizes = self.shapes if channels is None else _scaled(self.shapes, channels)
        shape = {"num_classes": num_classes, "in_channels": in_channels}
        pieces = sizes.pieces_of(sizes.largest, **shape)
        parts = {name: made(pieces[name]) for name in ("stem", "first")}
        layers = nn.Sequential()
        for row, (_, block) in enumerate(blocks_of(pieces["stages"])):
            kind = block.squeeze, block.swish, affine
            candidates = (*(_block(*size, *kind) for size in BLOCKS), _skip(affine))
            layer = make_edge(row, candidates, block.channels_in, block.channels_out, block.stride)
            assert layer is not None, "there is no operation that leaves a layer out"
            layers.append(layer)
        return CellNetwork({**parts, "layers": layers, "head": made(pieces["head"])})


def _scaled(shapes: MobileNet, channels: int) -> MobileNet:
    ratio = channels / shapes.widths[0]
    widths = tuple(multiple_of_8(width * ratio) for width in shapes.widths[1:])
    return replace(shapes, widths=(channels, *widths))


@cache  # equal candidates are one, and counted once
def _block(kernel: int, expansion: int, squeeze: bool, swish: bool, affine: bool) -> Candidate:
    def make(channels_in: int, channels_out: int, stride: int) -> nn.Module:
        shape = Block(channels_in, channels_out, stride, squeeze, swish, kernel, expansion)
        return InvertedResidual(shape, affine=affine)

    return make


@cache
def _skip(affine: bool) -> Candidate:
    def make(channels_in: int, channels_out: int, stride: int) -> nn.Module:
        if stride == 1 and channels_in == channels_out:
            return nn.Identity()
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )

    return make
