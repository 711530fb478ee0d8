"""Elastic layers, whose sizes may be choices: they run with their first channels, blocks or heads, or a smaller kernel.

    y = W[:channels out, :channels in] x + b[:channels out]

The number of input channels is that of the input; the number of output channels is the present value of the
layer's size. Slices share the memory of a parameter, and their gradients add up in it. At full size a layer
equals PyTorch's, bit for bit.

A depthwise convolution runs with smaller kernels too:

    W₅ = M₅ · centre₅(W₇),   W₃ = M₃ · centre₃(W₅),   M₅: 25×25, M₃: 9×9, both identity at start

The matrices are learned, one pair a layer, the same for all its channels: 706 numbers.

In attention, the rows of the one matrix that gives queries, keys and values are three blocks of heads: a part
takes the first heads of each block. A head has the same size in every sub-network, so that its scale is the
same.
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
from fl_lightning.nas.spaces.choices import Size, ValueChoice, is_open, most, now, size_of


def fitting(elastic: type[nn.Module], *sizes: Any, **options: Any) -> Any:
    """Return an elastic layer if one of its sizes is a choice, else PyTorch's layer."""
    kind: Any = elastic if is_open(*sizes) else elastic.__base__
    return kind(*sizes, **options)


class ElasticConv2d(nn.Conv2d):
    """A convolution over the channels that come in; one group. Channels may be choices.

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
        """Return (batch, channels out, height, width)."""
        weight, bias = _first(self.weight, self.bias, now(self._out), x.shape[1])
        return functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


class ElasticLinear(nn.Linear):
    """An affine map of the features that come in. Features may be choices."""

    def __init__(self, in_features: Size, out_features: Size, bias: bool = True) -> None:
        super().__init__(most(in_features), most(out_features), bias)
        self._out = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., features out)."""
        return functional.linear(x, *_first(self.weight, self.bias, now(self._out), x.shape[-1]))


class ElasticLayerNorm(nn.LayerNorm):
    """Layer norm over the features that come in, whose number may be a choice."""

    def __init__(self, features: Size, eps: float = 1e-5) -> None:
        super().__init__(most(features), eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        features = x.shape[-1]
        weight, bias = self.weight[:features], self.bias[:features]
        return functional.layer_norm(x, (features,), weight, bias, self.eps)


class ElasticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of the channels that come in, whose number may be a choice, with the first statistics.

    Training moves those, as it would in the sub-network alone. Sub-networks share them though, and
    the statistics of one are not those of another: recalibrate before you evaluate one
    (`fl_lightning.nas.sub_networks.recalibration`).
    """

    def __init__(self, num_features: Size, **options: Any) -> None:
        super().__init__(most(num_features), **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
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


class ElasticSqueezeExcite(nn.Module):
    """Squeeze-and-excitation over the channels that come in; of all of them it is timm's.

        y = x · hard sigmoid(W₂ relu(W₁ mean(x)))

    Args:
        channels: number of channels.
    """

    def __init__(self, channels: Size) -> None:
        super().__init__()
        squeezed = size_of(squeezed_channels, channels)
        self.conv_reduce = ElasticConv2d(channels, squeezed, 1)
        self.conv_expand = ElasticConv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        squeezed = self.conv_reduce(x.mean((2, 3), keepdim=True))
        return x * functional.hardsigmoid(self.conv_expand(squeezed.relu()))


def squeezed_channels(channels: int) -> int:
    """Return a quarter of the channels, as a multiple of 8 that is not much less."""
    return multiple_of_8(channels / 4)


def multiple_of_8(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8, that is not a tenth less.

    Example:
        >>> [multiple_of_8(channels) for channels in (3, 20, 30, 35, 166.4)]
        [8, 24, 32, 32, 168]
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def _first(
    weight: Tensor, bias: Tensor | None, out: int, into: int
) -> tuple[Tensor, Tensor | None]:
    """Return views of the first rows and columns; the same tensors if those are all."""
    if weight.shape[1] != into:
        weight = weight[:, :into]
    if out == weight.shape[0]:
        return weight, bias
    return weight[:out], None if bias is None else bias[:out]


class Repeat(nn.ModuleList):
    """Blocks, one after the other, whose number may be a choice.

    Args:
        blocks: at least as many as the largest depth; a generator makes no more.
        depth: number of blocks that run.
    """

    def __init__(self, blocks: Iterable[nn.Module], depth: Size) -> None:
        super().__init__(islice(blocks, most(depth)))
        self._depth = depth

    def forward(self, x: Tensor) -> Tensor:
        """Run the first blocks."""
        for block in islice(self, now(self._depth)):
            x = block(x)
        return x


class ElasticDepthwise(nn.Conv2d):
    """A convolution of each channel by itself that keeps the side (at stride 1), without bias.

    Args:
        channels: number of channels.
        kernel: odd, or a choice of odd numbers.
        stride: of the convolution.

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
            raise ConfigurationError(f"kernels must be odd numbers, got {options}")
        largest, number = self.kernels[0], most(channels)
        super().__init__(number, number, largest, stride, largest // 2, groups=number, bias=False)
        self._kernel = kernel
        self.matrices = nn.ParameterDict(
            {str(kernel): nn.Parameter(torch.eye(kernel**2)) for kernel in self.kernels[1:]}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels as come in, convolved with the present kernel."""
        kernel, channels = now(self._kernel), x.shape[1]
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
        """Masks of the entries that a sub-network with a plain layer of this size uses, by parameter.

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


class ElasticQKV(nn.Linear):
    """Queries, keys and values of the first heads, one after the other.

    Args:
        features: number of features that come in.
        heads: number of heads.
        head_features: of a head.
    """

    def __init__(self, features: Size, heads: Size, head_features: int) -> None:
        super().__init__(most(features), 3 * most(heads) * head_features)
        self._heads, self._head_features = heads, head_features

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, 3 · heads · head_features)."""
        features, rows = x.shape[-1], now(self._heads) * self._head_features
        if 3 * rows == self.out_features:
            return functional.linear(x, self.weight[:, :features], self.bias)
        # three products: the blocks' rows are apart, and one matrix of them would be a copy
        blocks = zip(self.weight.chunk(3), self.bias.chunk(3), strict=True)
        return torch.cat(
            [functional.linear(x, w[:rows, :features], b[:rows]) for w, b in blocks], -1
        )

    def held_by(self, part: nn.Linear) -> dict[str, Tensor]:
        """Masks of the coordinates of a plain layer with fewer heads, by parameter."""
        held = {
            name: torch.zeros(own.shape, dtype=torch.bool) for name, own in self.named_parameters()
        }
        rows = part.out_features // 3
        held["weight"].unflatten(0, (3, -1))[:, :rows, : part.in_features] = True
        held["bias"].unflatten(0, (3, -1))[:, :rows] = True
        return held

    def copy_to(self, part: nn.Linear) -> None:
        """Write the numbers of a plain layer of fewer heads."""
        rows = part.out_features // 3
        with torch.no_grad():
            weight = self.weight.unflatten(0, (3, -1))[:, :rows, : part.in_features]
            part.weight.copy_(weight.flatten(0, 1))
            part.bias.copy_(self.bias.unflatten(0, (3, -1))[:, :rows].flatten())


class Attention(nn.Module):
    """Softmax attention, as timm's, with heads of a fixed size.

    Args:
        features: number of features that come in and go out.
        heads: number of heads.
        head_features: of a head.
    """

    def __init__(self, features: Size, heads: Size, head_features: int) -> None:
        super().__init__()
        inner = size_of(mul, heads, head_features)
        self.head_features = head_features
        self.qkv = (
            ElasticQKV(features, heads, head_features)
            if is_open(features, heads)
            else nn.Linear(features, 3 * inner)  # type: ignore[arg-type]
        )
        self.proj = fitting(ElasticLinear, inner, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of x, (batch, tokens, features)."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_features))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
