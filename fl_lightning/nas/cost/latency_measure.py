"""Measures a latency table on this device: blocks, then whole networks to fit and to check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.cost.blocks import blocks_of
from fl_lightning.nas.cost.latency import Accuracy, LatencyTable, Where
from fl_lightning.nas.cost.stopwatch import Pace, device_name, time_blocks, time_networks
from fl_lightning.nas.spaces.space import Architecture, SearchSpace


def measure_latency(
    space: SearchSpace,
    *,
    side: int = 32,
    options: Mapping[str, Any],
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    calibration: int = 12,
    held_out: int = 20,
    pace: Pace | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> LatencyTable:
    """Return the latencies of a space's networks on a device.

    Args:
        space: of cells or of sizes.
        side: of the images, in pixels.
        options: of the space's `build`; ``num_classes`` and ``in_channels`` among them.
        device: to measure on, with as many threads as PyTorch has now.
        batch_size: images at a time.
        calibration: whole networks to fit the sum of blocks to, at least 2.
        held_out: others, to find the error on, at least 2.
        pace: of the timing.
        seed: of the networks.
        say: is told how far it is.

    Raises:
        ConfigurationError: if there are too few networks.
    """
    for name, number in {"calibration": calibration, "held_out": held_out}.items():
        if number < 2:
            raise ConfigurationError(f"{name} must be at least 2 networks, got {number}")
    device, pace = torch.device(device), pace or Pace()
    generator = torch_generator(seed, "latency networks")
    image = torch.randn(batch_size, options["in_channels"], side, side, device=device)

    marked = list(blocks_of(space, options).networks(generator))
    networks = [_ready(network, device) for network, _ in marked]
    kinds = [kinds for _, kinds in marked]
    blocks, rest = time_blocks(networks, kinds, image, pace, lambda text: say(f"blocks, {text}"))

    chosen = distinct(space, calibration + held_out, generator)
    networks = [_ready(space.build(one, **options), device) for one in chosen]  # type: ignore[attr-defined]
    whole = time_networks(networks, image, pace, lambda text: say(f"networks, {text}"))

    where = Where(
        device_name(device), device.type, torch.get_num_threads(), torch.__version__, batch_size
    )
    sums = LatencyTable(
        space, side, dict(options), where, blocks, rest, 1.0, 0.0, Accuracy(0, 0.0, 0.0)
    )
    added = [sums.uncalibrated(one) for one in chosen]
    scale, shift = fit_affine(added[:calibration], whole[:calibration])
    predicted = [scale * value + shift for value in added[calibration:]]
    accuracy = accuracy_of(predicted, whole[calibration:])
    return LatencyTable(space, side, dict(options), where, blocks, rest, scale, shift, accuracy)


def distinct(space: SearchSpace, count: int, generator: torch.Generator) -> list[Architecture]:
    """Return different random architectures.

    Raises:
        ConfigurationError: if the space has fewer.
    """
    if space.size < count:
        raise ConfigurationError(
            f"{space.name} has {space.size} networks, fewer than the {count} to calibrate with and to "
            "hold out"
        )
    found: dict[tuple[int, ...], Architecture] = {}
    while len(found) < count:
        drawn = space.sample(generator)
        found.setdefault(drawn.choices, drawn)
    return list(found.values())


def fit_affine(sums: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return a and b of the least sum of squares of ((a · sum + b) - measured) / measured.

    If a would not be positive, the sums say nothing about these networks: a is then the ratio of the
    medians and b is 0.

    Example:
        >>> a, b = fit_affine([1.0, 2.0, 4.0], [2.5, 4.5, 8.5])
        >>> round(a, 6), round(b, 6)
        (2.0, 0.5)
    """
    x, y = np.asarray(sums, dtype=float), np.asarray(measured, dtype=float)
    design = np.stack([x, np.ones_like(x)], 1) / y[:, None]
    (scale, shift), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
    if scale <= 0:
        return float(np.median(y) / np.median(x)), 0.0
    return float(scale), float(shift)


def accuracy_of(predicted: Sequence[float], measured: Sequence[float]) -> Accuracy:
    """Return how far off predictions are.

    Example:
        >>> accuracy_of([1.0, 3.0, 3.0], [1.0, 2.0, 4.0]).mape
        0.25
    """
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    rank = rank_correlation(predicted, measured)
    return Accuracy(len(m), float(np.mean(np.abs(p - m) / m)), rank)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 where one of the two is constant, or nothing."""
    from scipy.stats import spearmanr

    is_constant = len(set(predicted)) < 2 or len(set(measured)) < 2
    return 0.0 if is_constant else float(spearmanr(predicted, measured).statistic)


def _ready(network: nn.Module, device: torch.device) -> nn.Module:
    return network.to(device).eval()
