"""The network of the ResNet space: stem, stages of bottleneck blocks, mean, classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.cost.layers import convolution, halved, normalised, outputs
from fl_lightning.nas.elastic.depth import ElasticDepth
from fl_lightning.nas.elastic.sorting import Channels, norm_tensors
from fl_lightning.nas.elastic.width import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticLinear,
    multiple_of_8,
)
from fl_lightning.nas.spaces.space import Architecture


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
        """How many channels there are inside."""
        return hidden_channels(self.channels_out, self.expansion)


def hidden_channels(channels: int, expansion: float) -> int:
    """Return this share of the channels, as a multiple of 8 that is not much less."""
    return multiple_of_8(round(channels * expansion))


class BottleneckBlock(nn.Module):
    """A block; its parameters are named as in timm's `Bottleneck`.

    Args:
        shape: of the block.
        elastic: whether parts of it can run.
    """

    def __init__(self, shape: Bottleneck, *, elastic: bool) -> None:
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
        """Return where the channels inside live: before the 3×3 convolution, and after it."""
        first = [(tensor, 0) for tensor in (self.conv1.weight, *norm_tensors(self.bn1))]
        second = [(tensor, 0) for tensor in (self.conv2.weight, *norm_tensors(self.bn2))]
        return [
            Channels((*first, (self.conv2.weight, 1)), (self.conv2.weight, 1)),
            Channels((*second, (self.conv3.weight, 1)), (self.conv3.weight, 1)),
        ]


class ResNetNetwork(nn.Module):
    """A network of the space.

    Args:
        space: it is of.
        stages: the shapes of its blocks.
        num_classes: of the classifier.
        in_channels: of the images.
        elastic: whether parts of it can run.
    """

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
        stride, pool = space.stem_strides
        kernel = 3 if stride == 1 else 7
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, space.stem, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(space.stem),
            nn.ReLU(),
            nn.Identity() if pool == 1 else nn.MaxPool2d(3, pool, padding=1),
        )
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


def block_cost(shape: Bottleneck, side: int) -> Cost:
    """Return what one image of this side costs a block."""
    hidden, width = shape.hidden, shape.channels_out
    before, after = side**2, halved(side, shape.stride) ** 2
    cost = normalised(convolution(shape.channels_in, hidden, 1, before), hidden, before)
    cost += normalised(convolution(hidden, hidden, 3, after), hidden, after)
    cost += normalised(convolution(hidden, width, 1, after), width, after)
    if shape.opens:
        shortcut = convolution(shape.channels_in, width, 1, after)
        cost += normalised(shortcut, width, after, activated=False)
        if shape.stride > 1:
            cost += outputs(shape.channels_in * after)
    return cost


def stem_cost(
    channels: int, strides: tuple[int, int], side: int, in_channels: int
) -> tuple[Cost, int]:
    """Return what one image costs the stem, and the side after it."""
    stride, pool = strides
    side = halved(side, stride)
    kernel = 3 if stride == 1 else 7
    cost = normalised(convolution(in_channels, channels, kernel, side**2), channels, side**2)
    if pool == 1:
        return cost, side
    side = halved(side, pool)
    return cost + outputs(channels * side**2), side
