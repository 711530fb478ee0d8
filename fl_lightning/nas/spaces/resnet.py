"""The ResNet space of Once-for-All: width and depth of a stage, expansion of each block.

    network: stem, stages of bottleneck blocks, mean, classifier
    block: 1×1 to e·C channels - 3×3 - 1×1 to C, + x;   C: the stage's channels times its width

Sources: Cai et al. 2020 (Once-for-All), released code (`OFAResNets`); He et al. 2019 ("bag of tricks")
for the shortcut, which averages before it convolves.
Differs: one convolution as stem, of fixed width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost, Piece, chain_cost
from fl_lightning.nas.spaces.elastic import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticDepth,
    ElasticLinear,
    multiple_of_8,
)
from fl_lightning.nas.spaces.sizes import Number, Part, Size, SizeSpace, finish_settings
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.spaces.subnetwork import Channels, norm_tensors


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
        finish_settings(self)
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
        before, stages = self.stem, []
        for stage, part in enumerate(self.sizes(architecture)):
            width = self.stage_channels(stage, part.own[0])
            blocks = []
            for number, (expansion,) in enumerate(part.blocks):
                stride = self.strides[stage] if number == 0 else 1
                blocks.append(Bottleneck(before, width, stride, expansion, opens=number == 0))
                before = width
            stages.append(blocks)
        return stages

    @override
    def network(
        self, architecture: Architecture, *, num_classes: int, in_channels: int, elastic: bool
    ) -> ResNetNetwork:
        return ResNetNetwork(self, self.blocks(architecture), num_classes, in_channels, elastic)

    @override
    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        blocks = [block for stage in self.blocks(architecture) for block in stage]
        pieces: list[Piece] = [
            (stem, in_channels, self.stem, self.stem_strides),
            *((BottleneckBlock, block) for block in blocks),
            (nn.AdaptiveAvgPool2d, 1),
            (nn.Flatten,),
            (nn.Linear, blocks[-1].channels_out, num_classes),
        ]
        return chain_cost(pieces, (in_channels, side, side))


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


@dataclass(frozen=True)
class Bottleneck:
    """The shape of a block.

    Attributes:
        channels_in: of its input.
        channels_out: of its output.
        stride: of its 3×3 convolution.
        expansion: share of the output's channels that there are inside.
        opens: whether it is the first of a stage, with a convolution as its shortcut.
    """

    channels_in: int
    channels_out: int
    stride: int
    expansion: float
    opens: bool

    @property
    def hidden(self) -> int:
        """Number of inner channels."""
        return hidden_channels(self.channels_out, self.expansion)


def hidden_channels(channels: int, expansion: float) -> int:
    """Return this share of the channels, as a multiple of 8 that is not much less."""
    return multiple_of_8(round(channels * expansion))


class BottleneckBlock(nn.Module):
    """A block; its parameters are named as in timm's `Bottleneck`."""

    def __init__(self, shape: Bottleneck, *, elastic: bool = False) -> None:
        super().__init__()
        convolution_ = partial(ElasticConv2d if elastic else nn.Conv2d, bias=False)
        norm = ElasticBatchNorm2d if elastic else nn.BatchNorm2d
        before, width, hidden = shape.channels_in, shape.channels_out, shape.hidden
        self.conv1, self.bn1, self.act1 = convolution_(before, hidden, 1), norm(hidden), nn.ReLU()
        self.conv2 = convolution_(hidden, hidden, 3, shape.stride, padding=1)
        self.bn2, self.act2 = norm(hidden), nn.ReLU()
        self.conv3, self.bn3, self.act3 = convolution_(hidden, width, 1), norm(width), nn.ReLU()
        self.downsample: nn.ModuleList | None = None
        if shape.opens:
            pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)
            averaged = nn.Identity() if shape.stride == 1 else pool
            self.downsample = nn.ModuleList([averaged, convolution_(before, width, 1), norm(width)])

    def forward(self, x: Tensor, expansion: float | None = None, width: int = 0) -> Tensor:
        """Return the block's output; with sizes, that of the part of a supernet's block."""
        inner = () if expansion is None else (hidden_channels(width, expansion),)
        outer = () if expansion is None else (width,)
        inside = self.act1(self.bn1(self.conv1(x, *inner)))
        inside = self.act2(self.bn2(self.conv2(inside, *inner)))
        inside = self.bn3(self.conv3(inside, *outer))
        if self.downsample is not None:
            pool, convolved, norm = self.downsample
            x = norm(convolved(pool(x), *outer))
        return self.act3(x + inside)  # type: ignore[no-any-return]

    def hidden_channels(self) -> list[Channels]:
        """Return the tensors with the inner channels before and after the 3×3 convolution."""
        first = [(tensor, 0) for tensor in (self.conv1.weight, *norm_tensors(self.bn1))]
        second = [(tensor, 0) for tensor in (self.conv2.weight, *norm_tensors(self.bn2))]
        return [
            Channels((*first, (self.conv2.weight, 1)), (self.conv2.weight, 1)),
            Channels((*second, (self.conv3.weight, 1)), (self.conv3.weight, 1)),
        ]


def stem(channels_in: int, channels: int, strides: tuple[int, int]) -> nn.Sequential:
    """Return a convolution, batch norm, ReLU, and a pool if its stride is above 1."""
    stride, pool = strides
    kernel = 3 if stride == 1 else 7
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Identity() if pool == 1 else nn.MaxPool2d(3, pool, padding=1),
    )


class ResNetNetwork(nn.Module):
    """A network of the space."""

    def __init__(
        self,
        space: Any,
        stages: Sequence[Sequence[Bottleneck]],
        num_classes: int,
        in_channels: int,
        elastic: bool,
    ) -> None:
        super().__init__()
        self.space, self.num_classes, self.in_channels = space, num_classes, in_channels
        self.stem = stem(in_channels, space.stem, space.stem_strides)
        self.stages = nn.ModuleList(
            ElasticDepth([BottleneckBlock(shape, elastic=elastic) for shape in stage])
            for stage in stages
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        width = stages[-1][-1].channels_out
        self.head = (ElasticLinear if elastic else nn.Linear)(width, num_classes)

    def forward(self, x: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits, (batch, num_classes), of the whole or of a part of a supernet."""
        x = self.stem(x)
        parts = [None] * len(self.stages)
        parts = parts if architecture is None else self.space.sizes(architecture)
        for number, (stage, part) in enumerate(zip(self.stages, parts, strict=True)):
            if part is None:
                x = stage(x)
                continue
            width = self.space.stage_channels(number, part.own[0])
            x = stage(x, [(expansion, width) for (expansion,) in part.blocks])
        return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.head
