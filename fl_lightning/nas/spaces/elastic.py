"""Elastic layers: layers that can run with fewer channels, blocks or heads, or a smaller kernel.

    y = W[:channels out, :channels in] x + b[:channels out]

The number of input channels is that of the input; the number of output channels is the current option of a
choice. Sub-networks use slices of the same parameter, whose gradients add up. At full size a layer equals
PyTorch's, bit for bit.

A depthwise convolution can also run with a smaller kernel:

    W₅ = M₅ · centre₅(W₇),   W₃ = M₃ · centre₃(W₅),   M₅: 25×25, M₃: 9×9, both identity at start

The matrices are learned, one pair per layer for all channels: 706 numbers.

In attention a sub-network uses the first heads; all heads have the same number of features.
Sources: Cai et al. 2020, ICLR (Once-for-All), section 3 and in 3.2 "elastic depth" and "elastic kernel size";
Yu & Huang 2019 (slimmable networks); Chen et al. 2021, ICCV (AutoFormer), section 3.3, for heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.choices import (
    Size,
    ValueChoice,
    inside,
    is_open,
    most,
    now,
    size_of,
)


def fitting(elastic: type[nn.Module], *sizes: Any, **options: Any) -> Any:
    """Return an elastic layer if one of its sizes is a choice, otherwise the plain PyTorch layer."""
    kind: Any = elastic if is_open(*sizes) else elastic.__base__
    return kind(*sizes, **options)


class ElasticConv2d(nn.Conv2d):
    """Ungrouped convolution whose numbers of channels may be choices of a search space.

    Example:
        >>> import torch
        >>> width = ValueChoice([3, 6], label="width")
        >>> layer = ElasticConv2d(8, width, 1, bias=False)
        >>> width.index = 0
        >>> layer(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 3, 5, 5])
    """

    def __init__(self, in_channels: Size, out_channels: Size, *args: Any, **options: Any) -> None:
        super().__init__(most(in_channels), most(out_channels), *args, **options)
        self._out = out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolved images, (batch, channels out, height, width), for the current channels."""
        weight, bias = _first(self.weight, self.bias, now(self._out), x.shape[1])
        return functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


class ElasticLinear(nn.Linear):
    """Linear layer whose numbers of features may be choices of a search space."""

    def __init__(self, in_features: Size, out_features: Size, bias: bool = True) -> None:
        super().__init__(most(in_features), most(out_features), bias)
        self._out = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (..., features out), for the current number of features."""
        return functional.linear(x, *_first(self.weight, self.bias, now(self._out), x.shape[-1]))


class ElasticLayerNorm(nn.LayerNorm):
    """Layer norm whose number of features may be a choice of a search space."""

    def __init__(self, features: Size, eps: float = 1e-5) -> None:
        super().__init__(most(features), eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, of the same shape."""
        features = x.shape[-1]
        weight, bias = self.weight[:features], self.bias[:features]
        return functional.layer_norm(x, (features,), weight, bias, self.eps)


class ElasticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose number of channels may be a choice of a search space.

    Sub-networks share the running statistics, which fit none of them: recalibrate before you evaluate a
    sub-network (`fl_lightning.nas.sub_networks.evaluation`).
    """

    def __init__(self, num_features: Size, **options: Any) -> None:
        super().__init__(most(num_features), **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, of the same shape."""
        channels = x.shape[1]
        if channels == self.num_features:
            return super().forward(x)
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        assert self.momentum is not None
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return functional.batch_norm(
            x,
            mean[:channels],
            variance[:channels],
            self.weight[:channels],
            self.bias[:channels],
            self.training,
            self.momentum,
            self.eps,
        )


def multiple_of_8(channels: float) -> int:
    """Round to the nearest multiple of 8, at least 8 and at least 90 % of `channels`.

    Example:
        >>> [multiple_of_8(channels) for channels in (3, 20, 30, 35, 166.4)]
        [8, 24, 32, 32, 168]
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def hidden_channels(channels: int, expansion: float) -> int:
    """Return a block's number of inner channels: ``expansion`` times its channels, as a multiple of 8."""
    return multiple_of_8(round(channels * expansion))


def _first(
    weight: Tensor, bias: Tensor | None, out: int, into: int
) -> tuple[Tensor, Tensor | None]:
    """Return views of weight and bias for the first `out` outputs and `into` inputs."""
    if weight.shape[1] != into:
        weight = weight[:, :into]
    if out == weight.shape[0]:
        return weight, bias
    return weight[:out], None if bias is None else bias[:out]


class Repeat(nn.ModuleList):
    """Sequence of blocks whose depth (number of blocks that run) may be a choice of a search space.

    Args:
        blocks: generator of at least as many blocks as the largest depth; further ones are not made.
        depth: number of blocks that run, which may be a choice.

    Example:
        >>> depth = ValueChoice([1, 3], label="depth")
        >>> blocks = Repeat((nn.Linear(2, 2) for _ in range(9)), depth)
        >>> len(blocks), blocks(torch.zeros(1, 2)).shape
        (3, torch.Size([1, 2]))
    """

    def __init__(self, blocks: Iterable[nn.Module], depth: Size) -> None:
        super().__init__()
        self._depth, made = depth, iter(blocks)
        for number in range(most(depth)):
            with inside(depth, number):
                self.append(next(made))

    def forward(self, x: Tensor) -> Tensor:
        """Run the first blocks, as many as the current depth, and return their output."""
        for block in islice(self, now(self._depth)):
            x = block(x)
        return x


class ElasticDepthwise(nn.Conv2d):
    """Depthwise convolution without bias; channels and kernel size may be choices of a search space.

    It keeps the image size at stride 1.

    Args:
        channels: number of channels.
        kernel: odd kernel size, or a choice of odd sizes.
        stride: stride of the convolution.

    Raises:
        ConfigurationError: if a kernel is even.

    Example:
        >>> layer = ElasticDepthwise(2, ValueChoice([3, 5, 7], "kernel"))
        >>> sum(matrix.numel() for matrix in layer.matrices.values())
        706
        >>> with torch.no_grad():
        ...     weight = layer.weight.copy_(torch.arange(49.0).view(7, 7).expand(2, 1, 7, 7))
        >>> layer.kernel(3, 1).int().flatten().tolist()
        [16, 17, 18, 23, 24, 25, 30, 31, 32]
    """

    def __init__(self, channels: Size, kernel: int | ValueChoice, stride: int = 1) -> None:
        options: Any = kernel.options if isinstance(kernel, ValueChoice) else (kernel,)
        self.kernels: tuple[int, ...] = options[::-1]
        if any(option % 2 == 0 for option in options):
            raise ConfigurationError(
                f"kernels of ElasticDepthwise must be odd numbers, got {options}"
            )
        largest, number = self.kernels[0], most(channels)
        super().__init__(number, number, largest, stride, largest // 2, groups=number, bias=False)
        self._kernel = kernel
        self.matrices = nn.ParameterDict(
            {str(kernel): nn.Parameter(torch.eye(kernel**2)) for kernel in self.kernels[1:]}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input convolved with a kernel of the current size."""
        kernel, channels = now(self._kernel), x.shape[1]
        weight = self.kernel(kernel, channels)
        return functional.conv2d(x, weight, None, self.stride, kernel // 2, self.dilation, channels)

    def kernel(self, size: int, channels: int) -> Tensor:
        """Return the weight for a kernel size and the first channels, shape (channels, 1, size, size).

        The largest kernel is a view of the weight; smaller kernels are computed from it.
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
        """Return masks, by parameter, of this layer's entries that a smaller plain layer uses.

        Of the matrix of a kernel from which a smaller one is computed, only the rows inside that one are used.
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
        """Copy this layer's weight, for the kernel size of a plain layer, into the plain layer in place."""
        with torch.no_grad():
            part.weight.copy_(self.kernel(part.kernel_size[0], part.out_channels))


def _centre(weight: Tensor, larger: int, smaller: int) -> Tensor:
    margin = (larger - smaller) // 2
    inside = slice(margin, margin + smaller)
    return weight[..., inside, inside]


class Attention(nn.Module):
    """Softmax self-attention whose features and number of heads may be choices of a search space.

    Args:
        features: number of input and output features.
        heads: number of heads.
        head_features: number of features per head.
    """

    def __init__(self, features: Size, heads: Size, head_features: int) -> None:
        super().__init__()
        inner = size_of(mul, heads, head_features)
        self.head_features = head_features
        self.query = fitting(ElasticLinear, features, inner)
        self.key = fitting(ElasticLinear, features, inner)
        self.value = fitting(ElasticLinear, features, inner)
        self.proj = fitting(ElasticLinear, inner, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output in the shape of x, (batch, tokens, features)."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_features)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
