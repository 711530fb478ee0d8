"""What one example costs a layer, by formulas: they give what `count` finds when it runs the layer.

convolution   flops = k² · in / groups · out · area (+ out · area with bias)
linear        flops = tokens · in · out (+ tokens · out)
attention     flops = 2 · tokens² · heads · features of a head, besides its linear layers
batch norm, layer norm, activations, pools: no flops, their outputs are activations
"""

from __future__ import annotations

from fl_lightning.nas.cost.count import Cost


def convolution(
    channels_in: int,
    channels_out: int,
    kernel: int,
    area: int,
    *,
    depthwise: bool = False,
    bias: bool = False,
) -> Cost:
    """Return the cost of a convolution whose output has ``area`` pixels.

    Example:
        >>> convolution(3, 16, 3, 32 * 32)
        Cost(flops=442368, params=432, activations=16384)
    """
    weights = kernel**2 * channels_out * (1 if depthwise else channels_in)
    shifts = channels_out if bias else 0
    return Cost((weights + shifts) * area, weights + shifts, channels_out * area)


def linear(features_in: int, features_out: int, tokens: int = 1) -> Cost:
    """Return the cost of an affine map of each token."""
    params = (features_in + 1) * features_out
    return Cost(params * tokens, params, features_out * tokens)


def norm(channels: int, area: int) -> Cost:
    """Return the cost of a norm with a scale and a shift a channel."""
    return Cost(0, 2 * channels, channels * area)


def outputs(numbers: int) -> Cost:
    """Return the cost of a layer that only puts numbers out: an activation, a pool."""
    return Cost(0, 0, numbers)


def normalised(convolved: Cost, channels: int, area: int, *, activated: bool = True) -> Cost:
    """Return the cost of a convolution with its batch norm, and its activation."""
    cost = convolved + norm(channels, area)
    return cost + outputs(channels * area) if activated else cost


def halved(side: int, stride: int) -> int:
    """Return the side after a layer of this stride that pads: ⌈side / stride⌉."""
    return -(-side // stride)
