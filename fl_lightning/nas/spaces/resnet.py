"""ResNet space of Once-for-All: width and depth of each stage, expansion of each block.

    network: stem, stages of bottleneck blocks, mean, classifier
    block: 1×1 to e·C channels - 3×3 - 1×1 to C, + x;   C: the stage's channels times its width

Sources: Cai et al. 2020 (Once-for-All), released code (`OFAResNets`); He et al. 2019 ("bag of tricks")
for the shortcut, which averages before it convolves.
Differs: one convolution as stem, of fixed width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Piece
from fl_lightning.nas.spaces.choices import Number, Size, ValueChoice, pick, size_of
from fl_lightning.nas.spaces.elastic import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticLinear,
    fitting,
    hidden_channels,
    multiple_of_8,
)
from fl_lightning.nas.spaces.stages import (
    Pieces,
    RepeatedBlocks,
    StagedSpace,
    finish_settings,
    repeated,
)
from fl_lightning.nas.spaces.subnetwork import Channels


@final
@dataclass(frozen=True)
class ResNet(StagedSpace):
    """ResNet search space of Once-for-All: width and depth per stage, expansion per block.

    Attributes:
        stem: channels of the first convolution.
        channels: channels of each stage at width 1.
        strides: stride of each stage.
        stem_strides: strides of the first convolution and of the pool after it. With stride 1 the kernel of
            the convolution is 3 instead of 7, and there is no pool.
        widths: widths to choose from per stage, as factors of the channels.
        depths: numbers of blocks to choose from, for each stage.
        expansions: expansions to choose from per block: inner channels divided by channels of the stage.

    Example:
        >>> space = ResNet()
        >>> str(space.smallest)
        'w0.65:e0.2-e0.2|w0.65:e0.2-e0.2|w0.65:e0.2-e0.2-e0.2-e0.2|w0.65:e0.2-e0.2'
        >>> space.cost(space.largest, side=224, num_classes=1000).params
        48086760
    """

    name: ClassVar[str] = "resnet"
    letters: ClassVar[Mapping[str, str]] = {"width": "w", "expansion": "e"}

    stem: int = 64
    channels: tuple[int, ...] = (256, 512, 1024, 2048)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    stem_strides: tuple[int, int] = (2, 2)
    widths: tuple[float, ...] = (0.65, 0.8, 1.0)
    depths: tuple[tuple[int, ...], ...] = ((2, 3, 4), (2, 3, 4), (4, 5, 6), (2, 3, 4))
    expansions: tuple[float, ...] = (0.2, 0.25, 0.35)

    def __post_init__(self) -> None:
        finish_settings(self, width=self.widths, expansion=self.expansions)
        if len(self.stem_strides) != 2:
            raise ConfigurationError(
                f"{self.name}: stem_strides must be two numbers, of the convolution and of the pool, got "
                f"{self.stem_strides}"
            )
        if not len(self.channels) == len(self.strides) == len(self.depths) >= 1:
            raise ConfigurationError(
                f"{self.name}: channels, strides and depths must have one entry per stage, got "
                f"{len(self.channels)}, {len(self.strides)} and {len(self.depths)} entries"
            )
        for depths in self.depths:
            ValueChoice(depths, "depth")  # raises for options that do not rise

    @override
    def pieces(self, num_classes: int, in_channels: int) -> Pieces:
        stages: list[RepeatedBlocks] = []
        width: Any = self.stem
        for number in range(len(self.channels)):
            stage, width = self._stage(number, width)
            stages.append(stage)
        return {
            "stem": (stem, in_channels, self.stem, self.stem_strides),
            "stages": stages,
            "pool": (nn.AdaptiveAvgPool2d, 1),
            "flatten": (nn.Flatten,),
            "head": (fitting, ElasticLinear, width, num_classes),
        }

    def _stage(self, number: int, before: Size) -> tuple[RepeatedBlocks, Size]:
        """Return one stage's blocks and its number of channels; `before` is the previous stage's number."""
        name = f"stage {number + 1}"
        width = size_of(partial(self._channels, number), pick(self.widths, f"{name} width"))

        def block(index: int) -> Piece:
            expansion = pick(self.expansions, f"{name} block {index + 1} expansion")
            opens = index == 0
            stride, channels = (self.strides[number], before) if opens else (1, width)
            return Bottleneck, channels, width, stride, expansion, opens

        return repeated(pick(self.depths[number], f"{name} depth"), block), width

    def _channels(self, stage: int, width: Number) -> int:
        return multiple_of_8(self.channels[stage] * width)


def small_resnet() -> ResNet:
    """Return a ResNet space for images of 32 pixels: an eighth of the channels, no strides in the first layers."""
    return ResNet(
        stem=16,
        channels=(32, 64, 128, 256),
        stem_strides=(1, 1),
        widths=(0.5, 0.75, 1.0),
        depths=((1, 2), (1, 2), (1, 2), (1, 2)),
        expansions=(0.25, 0.5),
    )


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet; parameter names are those of timm's `Bottleneck`.

    Args:
        channels_in: channels of the input.
        channels_out: channels of the output.
        stride: stride of the 3×3 convolution.
        expansion: inner channels divided by `channels_out`.
        opens: whether the block is the first of a stage, with a convolution in the shortcut.
    """

    def __init__(
        self, channels_in: Size, channels_out: Size, stride: int, expansion: Size, opens: bool
    ) -> None:
        super().__init__()
        convolution = partial(fitting, ElasticConv2d, bias=False)
        norm = partial(fitting, ElasticBatchNorm2d)
        hidden = size_of(hidden_channels, channels_out, expansion)
        self.conv1, self.bn1 = convolution(channels_in, hidden, 1), norm(hidden)
        self.act1 = nn.ReLU()
        self.conv2 = convolution(hidden, hidden, 3, stride, padding=1)
        self.bn2, self.act2 = norm(hidden), nn.ReLU()
        self.conv3, self.bn3 = convolution(hidden, channels_out, 1), norm(channels_out)
        self.act3 = nn.ReLU()
        self.downsample: nn.Sequential | None = None
        if opens:
            pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)
            self.downsample = nn.Sequential(
                nn.Identity() if stride == 1 else pool,
                convolution(channels_in, channels_out, 1),
                norm(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        inside = self.act1(self.bn1(self.conv1(x)))
        inside = self.act2(self.bn2(self.conv2(inside)))
        inside = self.bn3(self.conv3(inside))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.act3(shortcut + inside)  # type: ignore[no-any-return]

    def residual_branches(self) -> list[nn.Module]:
        """Return the last layer of the residual branch, before the shortcut is added."""
        return [self.bn3]

    def hidden_channels(self) -> list[Channels]:
        """Return the block's two groups of sortable inner channels: before and after the 3×3 convolution."""
        return [
            Channels((self.conv1, self.bn1), (self.conv2,)),
            Channels((self.conv2, self.bn2), (self.conv3,)),
        ]


def stem(channels_in: int, channels: int, strides: tuple[int, int]) -> nn.Sequential:
    """Return the network's first layers: convolution, batch norm, ReLU; a pool if its stride is above 1."""
    stride, pool = strides
    kernel = 3 if stride == 1 else 7
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Identity() if pool == 1 else nn.MaxPool2d(3, pool, padding=1),
    )
