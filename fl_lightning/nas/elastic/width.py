"""Layers whose first channels run alone: a narrow sub-network is a view of the widest one.

    y = W[:channels out, :channels in] x + b[:channels out]

How many channels come in is what the input has; how many go out is an argument. Slices of a
parameter share its memory, and their gradients add up in the whole parameter's. Called without sizes
on a full input, a layer is PyTorch's own, bit for bit.
Sources: Cai et al. 2020, ICLR (Once-for-All), section 3; Yu & Huang 2019 (slimmable networks).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ElasticConv2d(nn.Conv2d):
    """A convolution over the channels that come in, to the first ``channels_out``; one group.

    Example:
        >>> import torch
        >>> layer = ElasticConv2d(8, 6, 1, bias=False)
        >>> layer(torch.zeros(1, 4, 5, 5), 3).shape
        torch.Size([1, 3, 5, 5])
    """

    def forward(self, x: Tensor, channels_out: int | None = None) -> Tensor:
        """Return (batch, channels_out, height, width); without a number, of all of them."""
        weight, bias = _first(self.weight, self.bias, channels_out, x.shape[1])
        return functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


class ElasticLinear(nn.Linear):
    """An affine map of the features that come in, to the first ``features_out``."""

    def forward(self, x: Tensor, features_out: int | None = None) -> Tensor:
        """Return (..., features_out); without a number, all of them."""
        return functional.linear(x, *_first(self.weight, self.bias, features_out, x.shape[-1]))


class ElasticLayerNorm(nn.LayerNorm):
    """Layer norm over the features that come in."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        features = x.shape[-1]
        weight, bias = self.weight[:features], self.bias[:features]
        return functional.layer_norm(x, (features,), weight, bias, self.eps)


class ElasticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of the channels that come in, with the first of the running statistics.

    Training moves those, as it would in the sub-network alone. Sub-networks share them though, and
    the statistics of one are not those of another: recalibrate before you evaluate one
    (`fl_lightning.nas.elastic.calibration`).
    """

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
        channels: at most.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = squeezed_channels(channels)
        self.conv_reduce = ElasticConv2d(channels, squeezed, 1)
        self.conv_expand = ElasticConv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        channels = x.shape[1]
        squeezed = self.conv_reduce(x.mean((2, 3), keepdim=True), squeezed_channels(channels))
        return x * functional.hardsigmoid(self.conv_expand(squeezed.relu(), channels))


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
    weight: Tensor, bias: Tensor | None, out: int | None, into: int
) -> tuple[Tensor, Tensor | None]:
    """Return views of the first rows and columns; the same tensors if those are all."""
    if weight.shape[1] != into:
        weight = weight[:, :into]
    if out is None or out == weight.shape[0]:
        return weight, bias
    return weight[:out], None if bias is None else bias[:out]
