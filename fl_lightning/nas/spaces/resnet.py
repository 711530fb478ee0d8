"""The ResNet space of Once-for-All: width and depth of a stage, expansion of each block.

    block: 1×1 to e·C channels - 3×3 - 1×1 to C, + x;   C: the stage's channels times its width

Sources: Cai et al. 2020 (Once-for-All), released code (`OFAResNets`); He et al. 2019 ("bag of tricks")
for the shortcut, which averages before it convolves.
Differs: one convolution as stem, of fixed width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.cost.layers import halved, linear, outputs
from fl_lightning.nas.elastic.width import multiple_of_8
from fl_lightning.nas.spaces.networks.resnet import (
    Bottleneck,
    ResNetNetwork,
    block_cost,
    stem_cost,
)
from fl_lightning.nas.spaces.parts import Number, Part, Size
from fl_lightning.nas.spaces.settings import settle
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


@final
@dataclass(frozen=True)
class ResNet(SizeSpace):
    """The space.

    Attributes:
        stem: channels of the first convolution.
        channels: of the stages, at width 1.
        strides: of the stages.
        stem_strides: of the first convolution and of the pool after it; 1: no pool, a small kernel.
        widths: to choose from for a stage: shares of its channels.
        depths: to choose from, for each stage.
        expansions: to choose from for a block: shares of the stage's channels inside it.

    Example:
        >>> space = ResNet()
        >>> str(space.smallest)
        'w0.65:e0.2-e0.2|w0.65:e0.2-e0.2|w0.65:e0.2-e0.2-e0.2-e0.2|w0.65:e0.2-e0.2'
        >>> space.cost(space.largest, side=224, num_classes=1000).params
        48086760
    """

    name: ClassVar[str] = "resnet"

    stem: int = 64
    channels: tuple[int, ...] = (256, 512, 1024, 2048)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    stem_strides: tuple[int, int] = (2, 2)
    widths: tuple[float, ...] = (0.65, 0.8, 1.0)
    depths: tuple[tuple[int, ...], ...] = ((2, 3, 4), (2, 3, 4), (4, 5, 6), (2, 3, 4))
    expansions: tuple[float, ...] = (0.2, 0.25, 0.35)

    def __post_init__(self) -> None:
        settle(self)
        if not len(self.channels) == len(self.strides) == len(self.depths) >= 1:
            raise ConfigurationError(
                f"{self.name}: channels, strides and depths are for the same stages, got "
                f"{len(self.channels)}, {len(self.strides)} and {len(self.depths)} of them"
            )
        self.named_sizes  # noqa: B018 - refuses options that do not rise

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stages."""
        own = (Size("width", "w", self.widths),)
        block = (Size("expansion", "e", self.expansions),)
        return tuple(
            Part(f"stage {number}", own, Size("depth", "", depths), block)
            for number, depths in enumerate(self.depths, 1)
        )

    def stage_channels(self, stage: int, width: Number) -> int:
        """Return the channels of a stage of this width, a multiple of 8."""
        return multiple_of_8(self.channels[stage] * width)

    def blocks(self, architecture: Architecture) -> list[list[Bottleneck]]:
        """Return the shapes of the blocks, stage by stage."""
        return list(self._stages(architecture))

    def _stages(self, architecture: Architecture) -> Iterator[list[Bottleneck]]:
        before = self.stem
        for stage, part in enumerate(self.sizes(architecture)):
            width = self.stage_channels(stage, part.own[0])
            blocks = []
            for number, (expansion,) in enumerate(part.blocks):
                stride = self.strides[stage] if number == 0 else 1
                blocks.append(Bottleneck(before, width, stride, expansion, opens=number == 0))
                before = width
            yield blocks

    def network(
        self, architecture: Architecture, *, num_classes: int, in_channels: int, elastic: bool
    ) -> ResNetNetwork:
        """Return the network of an architecture, of plain layers or of elastic ones."""
        return ResNetNetwork(self, self.blocks(architecture), num_classes, in_channels, elastic)

    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        """Return what one image costs, by formulas."""
        cost, side = stem_cost(self.stem, self.stem_strides, side, in_channels)
        stages = self.blocks(architecture)
        for block in (block for stage in stages for block in stage):
            cost += block_cost(block, side)
            side = halved(side, block.stride)
        width = stages[-1][-1].channels_out
        return cost + outputs(width) + linear(width, num_classes)


def small_resnet() -> ResNet:
    """Return the space for images of 32 pixels: an eighth of the channels, no halving at the stem."""
    return ResNet(
        stem=16,
        channels=(32, 64, 128, 256),
        stem_strides=(1, 1),
        widths=(0.5, 0.75, 1.0),
        depths=((1, 2), (1, 2), (1, 2), (1, 2)),
        expansions=(0.25, 0.5),
    )
