"""Operations on edges that more than one space has.

All normalise after they convolve, and convolve without bias: ReLU, convolution, batch norm.
Sources: Liu et al. 2019 (DARTS) and Dong & Yang 2020 (NAS-Bench-201), with their released code.
Differs: on images of odd side a factorized reduction pads by one; theirs cannot run there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class Zero(nn.Module):
    """Zeros, in the shape that an operation of this stride would give (``none``)."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


class ReLUConvBN(nn.Sequential):
    """ReLU, a convolution that keeps the side (at stride 1), batch norm."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool = True
    ) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )


class FactorizedReduce(nn.Module):
    """ReLU, then half of the channels from even pixels, half from odd ones: nothing is lost.

    Args:
        channels_in: of the input.
        channels_out: of the output, even.
        affine: whether the batch norm scales and shifts.
    """

    def __init__(self, channels_in: int, channels_out: int, affine: bool = True) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        half = channels_out // 2
        self.even = nn.Conv2d(channels_in, half, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - half, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, channels_out, ⌈side / 2⌉, ⌈side / 2⌉)."""
        x = self.relu(x)
        shifted = pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]


def average_pool(stride: int) -> nn.Module:
    """Return a 3×3 average that does not count the padding."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def depthwise(channels: int, kernel: int, stride: int, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution of each channel by itself that keeps the side (at stride 1)."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(
        channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False
    )


def separable(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return a separable convolution, twice: the published one."""
    return nn.Sequential(
        nn.ReLU(),
        depthwise(channels_in, kernel, stride),
        nn.Conv2d(channels_in, channels_in, 1, bias=False),
        nn.BatchNorm2d(channels_in, affine=affine),
        nn.ReLU(),
        depthwise(channels_in, kernel, 1),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out, affine=affine),
    )


def dilated(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return a separable convolution over every second pixel."""
    return nn.Sequential(
        nn.ReLU(),
        depthwise(channels_in, kernel, stride, dilation=2),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out, affine=affine),
    )
