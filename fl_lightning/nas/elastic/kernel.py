"""A depthwise convolution that runs with smaller kernels too.

    W₅ = M₅ · centre₅(W₇),   W₃ = M₃ · centre₃(W₅),   M₅: 25×25, M₃: 9×9, both identity at start

The matrices are learned, one pair a layer, the same for all its channels: 706 numbers.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic kernel size".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError


class ElasticDepthwise(nn.Conv2d):
    """A convolution of each channel by itself that keeps the side (at stride 1), without bias.

    Args:
        channels: at most.
        kernels: the sizes to choose from, odd.
        stride: of the convolution.

    Raises:
        ConfigurationError: if a size is even.

    Example:
        >>> layer = ElasticDepthwise(2, [3, 5, 7])
        >>> sum(matrix.numel() for matrix in layer.matrices.values())
        706
        >>> with torch.no_grad():
        ...     weight = layer.weight.copy_(torch.arange(49.0).view(7, 7).expand(2, 1, 7, 7))
        >>> layer.kernel(3, 1).int().flatten().tolist()
        [16, 17, 18, 23, 24, 25, 30, 31, 32]
    """

    def __init__(self, channels: int, kernels: Sequence[int], stride: int = 1) -> None:
        self.kernels = tuple(sorted(set(kernels), reverse=True))
        if not self.kernels or any(kernel % 2 == 0 for kernel in self.kernels):
            raise ConfigurationError(f"kernels must be odd numbers, got {tuple(kernels)}")
        largest = self.kernels[0]
        super().__init__(
            channels, channels, largest, stride, largest // 2, groups=channels, bias=False
        )
        self.matrices = nn.ParameterDict(
            {str(kernel): nn.Parameter(torch.eye(kernel**2)) for kernel in self.kernels[1:]}
        )

    def forward(self, x: Tensor, kernel: int | None = None) -> Tensor:
        """Return as many channels as come in, convolved with this kernel or the largest."""
        kernel = kernel or self.kernels[0]
        channels = x.shape[1]
        weight = self.kernel(kernel, channels)
        return functional.conv2d(x, weight, None, self.stride, kernel // 2, self.dilation, channels)

    def kernel(self, size: int, channels: int) -> Tensor:
        """Return the kernels of the first channels, (channels, 1, size, size).

        Of the largest size they are a view. Of smaller ones they are computed, at most 25 numbers a
        channel.
        """
        weight = self.weight[:channels]
        for larger, smaller in pairwise(self.kernels):
            if smaller < size:
                break
            centre = _centre(weight, larger, smaller).flatten(1)
            weight = functional.linear(centre, self.matrices[str(smaller)])
            weight = weight.view(channels, 1, smaller, smaller)
        return weight

    def held_by(self, part: nn.Conv2d) -> dict[str, Tensor]:
        """Return which coordinates a plain layer of smaller size comes from, by parameter.

        Of a matrix on the way those rows count that the next centre reads.
        """
        size, channels = part.kernel_size[0], part.out_channels
        held = {
            name: torch.zeros(own.shape, dtype=torch.bool) for name, own in self.named_parameters()
        }
        first = next((kernel for kernel in self.kernels[1:] if kernel >= size), self.kernels[0])
        _centre(held["weight"], self.kernels[0], first)[:channels] = True
        passed = [kernel for kernel in self.kernels[1:] if kernel >= size]
        for kernel, smaller in pairwise([*passed, size]):
            rows = held[f"matrices.{kernel}"].view(kernel, kernel, -1)
            _centre(rows.movedim(2, 0), kernel, smaller)[:] = True
        return held

    def copy_to(self, part: nn.Conv2d) -> None:
        """Write the kernels of a plain layer of smaller size."""
        with torch.no_grad():
            part.weight.copy_(self.kernel(part.kernel_size[0], part.out_channels))


def _centre(weight: Tensor, larger: int, smaller: int) -> Tensor:
    margin = (larger - smaller) // 2
    inside = slice(margin, margin + smaller)
    return weight[..., inside, inside]
