"""MobileNetV3 space of Once-for-All: depth of each stage, kernel and expansion of each block.

    network: stem, a fixed block, stages of inverted residuals, head
    block: 1×1 convolution to e·C channels - depthwise k×k - squeeze-and-excitation - 1×1 to C′, + x

Each convolution is followed by batch norm, the first two of a block also by an activation. Five stages of 2,
3 or 4 blocks, kernels of 3, 5, 7, expansions of 3, 4, 6: 9² + 9³ + 9⁴ = 7,371 choices per stage, 2.18·10¹⁹
networks. The default widths and strides are the published ones, for images of 224 pixels.
With `resolutions` the size of the images is a choice as well: the network resizes them before its stem.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.1, and its released code (`OFAMobileNetV3`);
Howard et al. 2019 (MobileNetV3); Yu et al. 2020, ECCV (BigNAS), section 3.1, for resolutions.
Differs: in the papers images are cropped and resized once, when they are read; here they are read at one size
and resized again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Piece
from fl_lightning.nas.spaces.cells import depthwise
from fl_lightning.nas.spaces.choices import Size, is_open, now, pick, size_of
from fl_lightning.nas.spaces.elastic import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticDepthwise,
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
class MobileNet(StagedSpace):
    """MobileNetV3 search space of Once-for-All: kernel and expansion per block, depth per stage.

    Attributes:
        kernels: kernel sizes to choose from, odd.
        expansions: expansions to choose from: inner channels of a block divided by input channels.
        depths: numbers of blocks to choose from, for every stage.
        widths: channels of the stem, the first block, each stage, the last convolution, and the layer
            before the classifier.
        strides: strides of the stem and of each stage.
        squeeze: whether blocks have squeeze-and-excitation: the first block, then each stage.
        swish: whether blocks have hard swish instead of ReLU: the first block, then each stage.
        resolutions: heights (= widths) of the images to choose from, in pixels; empty to leave images as they are.

    Example:
        >>> space = MobileNet()
        >>> f"{space.size:.3g}"
        '2.18e+19'
        >>> str(MobileNet(resolutions=(192, 224)).smallest)
        'r192:k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3'
        >>> str(space.smallest)
        'k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3|k3e3-k3e3'
        >>> space = small_mobilenet()
        >>> space.cost(space.largest, side=32).flops > 4 * space.cost(space.smallest, side=32).flops
        True
    """

    name: ClassVar[str] = "mobilenet"
    letters: ClassVar[Mapping[str, str]] = {"kernel": "k", "expansion": "e", "resolution": "r"}

    kernels: tuple[int, ...] = (3, 5, 7)
    expansions: tuple[int, ...] = (3, 4, 6)
    depths: tuple[int, ...] = (2, 3, 4)
    widths: tuple[int, ...] = (16, 16, 24, 40, 80, 112, 160, 960, 1280)
    strides: tuple[int, ...] = (2, 2, 2, 2, 1, 2)
    squeeze: tuple[bool, ...] = (False, False, True, False, True, True)
    swish: tuple[bool, ...] = (False, False, False, True, True, True)
    resolutions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = {"kernel": self.kernels, "expansion": self.expansions, "depth": self.depths}
        sizes |= {"resolution": self.resolutions} if self.resolutions else {}
        finish_settings(self, **sizes)
        stages = len(self.widths) - 4
        if (
            stages < 1
            or not len(self.strides) == len(self.squeeze) == len(self.swish) == stages + 1
        ):
            raise ConfigurationError(
                f"{self.name}: for n stages give n + 4 widths and n + 1 strides, squeeze and swish, got "
                f"{len(self.widths)}, {len(self.strides)}, {len(self.squeeze)} and {len(self.swish)}"
            )
        if any(kernel % 2 == 0 for kernel in self.kernels):
            raise ConfigurationError(f"{self.name}: kernels must be odd, got {self.kernels}")

    @override
    def pieces(self, num_classes: int, in_channels: int) -> Pieces:
        first, second, *_ = self.widths
        block = Block(first, second, 1, self.squeeze[0], self.swish[0], 3, 1, expands=False)
        resolution: Pieces = {}
        if self.resolutions:
            resolution = {"resize": (Resize, pick(self.resolutions, "network resolution"))}
        return {
            **resolution,
            "stem": (stem, in_channels, first, self.strides[0]),
            "first": (InvertedResidual, block),
            "stages": [self._stage(number) for number in range(1, len(self.strides))],
            "head": (head, *self.widths[-3:], num_classes),
        }

    def _stage(self, number: int) -> RepeatedBlocks:
        before, width = self.widths[number : number + 2]
        kind = self.squeeze[number], self.swish[number]

        def block(index: int) -> Piece:
            kernel = pick(self.kernels, f"stage {number} block {index + 1} kernel")
            expansion = pick(self.expansions, f"stage {number} block {index + 1} expansion")
            opens = index == 0
            stride, channels = (self.strides[number], before) if opens else (1, width)
            return InvertedResidual, Block(channels, width, stride, *kind, kernel, expansion)

        return repeated(pick(self.depths, f"stage {number} depth"), block)


def small_mobilenet() -> MobileNet:
    """Return a MobileNet space for images of 32 pixels: about a third of the channels, and fewer strides."""
    return MobileNet(
        widths=(16, 16, 16, 24, 32, 40, 56, 160, 256),
        strides=(1, 1, 2, 2, 1, 2),
    )


@dataclass(frozen=True)
class Block:
    """Settings of an inverted residual block; kernel and expansion may be choices of a search space."""

    channels_in: int
    channels_out: int
    stride: int
    squeeze: bool
    swish: bool
    kernel: Any
    expansion: Any
    expands: bool = True


class InvertedResidual(nn.Module):
    """Inverted residual block of MobileNet; parameter names are those of timm's `InvertedResidual`.

    Args:
        shape: shape of the block.
        affine: whether plain batch norms scale and shift.
    """

    def __init__(self, shape: Block, *, affine: bool = True) -> None:
        super().__init__()
        width, stride = shape.channels_out, shape.stride
        hidden = size_of(hidden_channels, shape.channels_in, shape.expansion)
        convolution = partial(fitting, ElasticConv2d, bias=False)
        norm = partial(fitting, ElasticBatchNorm2d, affine=affine)
        activation = nn.Hardswish if shape.swish else nn.ReLU
        self.adds = stride == 1 and shape.channels_in == width
        if shape.expands:
            self.conv_pw = convolution(shape.channels_in, hidden, 1)
            self.bn1 = norm(hidden)
            self.act1 = activation()
        is_elastic = is_open(hidden, shape.kernel)
        depthwise_ = ElasticDepthwise if is_elastic else depthwise
        self.conv_dw = depthwise_(hidden, shape.kernel, stride)
        self.bn2 = norm(hidden)
        self.act2 = activation()
        self.se: nn.Module = SqueezeExcite(hidden) if shape.squeeze else nn.Identity()
        self.conv_pwl = convolution(hidden, width, 1)
        self.bn3 = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        inside: Tensor = x
        if hasattr(self, "conv_pw"):
            inside = self.act1(self.bn1(self.conv_pw(x)))
        inside = self.se(self.act2(self.bn2(self.conv_dw(inside))))
        inside = self.bn3(self.conv_pwl(inside))
        return x + inside if self.adds else inside

    def residual_branches(self) -> list[nn.Module]:
        """Return the last layer of the residual branch, before the shortcut is added; none without a shortcut."""
        return [self.bn3] if self.adds else []

    def hidden_channels(self) -> list[Channels]:
        """Return the block's groups of sortable inner channels: the expanded ones, and those of the squeeze."""
        if not hasattr(self, "conv_pw"):
            return []
        out, into = (self.conv_pw, self.bn1, self.conv_dw, self.bn2), (self.conv_pwl,)
        if isinstance(self.se, nn.Identity):
            return [Channels(out, into)]
        reduce, expand = self.se.conv_reduce, self.se.conv_expand
        return [Channels((*out, expand), (reduce, *into)), Channels((reduce,), (expand,))]


class Resize(nn.Module):
    """Resize images to squares, bilinearly with antialiasing; the side in pixels may be a choice."""

    def __init__(self, side: Size) -> None:
        super().__init__()
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return the resized images, (batch, channels, side, side)."""
        size = [now(self._side)] * 2
        if list(x.shape[2:]) == size:
            return x
        return functional.interpolate(x, size, mode="bilinear", antialias=True)


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation y = x · hard sigmoid(W₂ relu(W₁ mean(x))); the channels may be a choice."""

    def __init__(self, channels: Size) -> None:
        super().__init__()
        squeezed = size_of(lambda number: multiple_of_8(number / 4), channels)
        self.conv_reduce = fitting(ElasticConv2d, channels, squeezed, 1)
        self.act1 = nn.ReLU(inplace=True)
        self.conv_expand = fitting(ElasticConv2d, squeezed, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its channels rescaled, in the same shape."""
        squeezed = self.act1(self.conv_reduce(x.mean((2, 3), keepdim=True)))
        return x * self.gate(self.conv_expand(squeezed))  # type: ignore[no-any-return]


def stem(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    """Return the network's first layers: a 3×3 convolution, batch norm, hard swish."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.Hardswish(),
    )


def head(channels: int, wide: int, mixed: int, num_classes: int) -> nn.Sequential:
    """Return the network's last layers: 1×1 convolution, mean over pixels, 1×1 convolution, classifier."""
    return nn.Sequential(
        nn.Conv2d(channels, wide, 1, bias=False),
        nn.BatchNorm2d(wide),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(wide, mixed, 1, bias=False),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(mixed, num_classes),
    )
