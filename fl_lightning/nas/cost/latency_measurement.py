"""Measurement of a latency table on this device: blocks, then whole networks for calibration and error.

A block that is timed alone has its input in the cache. So blocks are timed inside forward passes of whole
networks, by a time stamp before and after each block: CUDA events on a GPU, the clock on a CPU.

Every network is visited several times, with several forward passes per visit. A time is the median over visits
of the shortest pass of a visit, because other programs can only lengthen a pass.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.cost.blocks import blocks_of
from fl_lightning.nas.cost.latency import Accuracy, LatencyTable, Where
from fl_lightning.nas.spaces.space import Architecture, Networks, SearchSpace


@dataclass(frozen=True)
class TimingPlan:
    """Numbers of forward passes in a latency measurement.

    Attributes:
        warmup: number of passes per network before the first timed one.
        rounds: number of visits per network. In a round every network is visited once, so that a slow
            phase of the device affects all of them.
        passes: number of timed passes per visit, after one that is not timed.
    """

    warmup: int = 3
    rounds: int = 10
    passes: int = 4


def device_name(device: torch.device) -> str:
    """Return a device's product name, e.g. that of the GPU or CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def timed(
    networks: Sequence[nn.Module],
    blocks: Sequence[Mapping[nn.Module, str]],
    image: Tensor,
    pace: TimingPlan,
    say: Callable[[str], None],
) -> tuple[dict[str, float], list[float]]:
    """Time networks: return milliseconds by kind of block, and each network's milliseconds outside its blocks.

    Args:
        networks: networks in evaluation mode, on the device of the images.
        blocks: kinds of the blocks to time, by module, for every network.
        image: a batch of images.
        pace: numbers of forward passes.
        say: is called with the progress as text.
    """
    kinds: dict[str, list[float]] = {}
    rest: list[list[float]] = [[] for _ in networks]
    with torch.inference_mode():
        for network in networks:
            for _ in range(pace.warmup):
                network(image)
        for round_ in range(pace.rounds):
            for network, timed_blocks, own in zip(networks, blocks, rest, strict=True):
                network(image)  # the network before it filled the cache
                passes = [_pass(network, timed_blocks, image) for _ in range(pace.passes)]
                for module, kind in timed_blocks.items():
                    kinds.setdefault(kind, []).append(min(times[module] for times, _ in passes))
                own.append(min(whole - sum(times.values()) for times, whole in passes))
            say(f"round {round_ + 1} of {pace.rounds}")
    return {kind: median(times) for kind, times in kinds.items()}, [median(own) for own in rest]


def _stamp(device: torch.device) -> Any:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _milliseconds(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return 1e3 * float(after - before)
    return float(before.elapsed_time(after))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pass(
    network: nn.Module, blocks: Iterable[nn.Module], image: Tensor
) -> tuple[dict[nn.Module, float], float]:
    """Time one forward pass: return milliseconds of each block (each runs once), and of the whole pass."""
    device, begun = image.device, {}
    stamps: list[tuple[nn.Module, Any, Any]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        begun[module] = _stamp(device)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        stamps.append((module, begun[module], _stamp(device)))

    handles = [module.register_forward_pre_hook(before) for module in blocks]
    handles += [module.register_forward_hook(after) for module in blocks]
    try:
        _wait(device)
        start = time.perf_counter()
        network(image)
        _wait(device)
        whole = 1e3 * (time.perf_counter() - start)
    finally:
        for handle in handles:
            handle.remove()
    return {module: _milliseconds(start, end) for module, start, end in stamps}, whole


def measure_latency(
    networks: Networks,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    calibration: int = 12,
    held_out: int = 20,
    pace: TimingPlan | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> LatencyTable:
    """Measure the latency table of a search space on a device.

    Args:
        networks: networks of a built-in space.
        device: device to measure on; a CPU uses PyTorch's current number of threads.
        batch_size: number of images per batch.
        calibration: number of random networks for the fit of a and b, at least 2.
        held_out: number of further random networks for the error, at least 2.
        pace: numbers of forward passes; the defaults of `TimingPlan` if None.
        seed: seed of the random networks.
        say: is called with the progress as text.

    Raises:
        ConfigurationError: if a number is below 2, or the space has too few networks or is your own.
    """
    for name, number in {"calibration": calibration, "held_out": held_out}.items():
        check_range(name, number, "at least 2 networks")
    device, pace = torch.device(device), pace or TimingPlan()
    generator = torch_generator(seed, "latency networks")
    image = torch.randn_like(networks.images(batch_size), device=device)

    marked = list(blocks_of(networks).networks())
    built = [network.to(device).eval() for network, _ in marked]
    kinds = [kinds for _, kinds in marked]
    blocks, rests = timed(built, kinds, image, pace, lambda text: say(f"blocks, {text}"))
    rest = median(rests)

    chosen = distinct(networks.space, calibration + held_out, generator)
    built = [networks.build(one).to(device).eval() for one in chosen]
    nothing: list[dict[nn.Module, str]] = [{} for _ in built]
    _, whole = timed(built, nothing, image, pace, lambda text: say(f"networks, {text}"))

    where = Where(
        device_name(device), device.type, torch.get_num_threads(), torch.__version__, batch_size
    )
    unfitted = LatencyTable(networks, where, blocks, rest, 1.0, 0.0, Accuracy(0, 0.0, 0.0))
    added = [unfitted.uncalibrated(one) for one in chosen]
    scale, shift = fit_affine(added[:calibration], whole[:calibration])
    predicted = [scale * value + shift for value in added[calibration:]]
    accuracy = accuracy_of(predicted, whole[calibration:])
    return replace(unfitted, scale=scale, shift=shift, accuracy=accuracy)


def distinct(space: SearchSpace, count: int, generator: torch.Generator) -> list[Architecture]:
    """Draw `count` different random architectures; raise ConfigurationError if the space has fewer."""
    if space.size < count:
        raise ConfigurationError(
            f"latency: {space.name} has {space.size} networks, fewer than the {count} for calibration and error: "
            "lower --calibration or --held_out, or use a larger space"
        )
    found: dict[Architecture, None] = {}
    while len(found) < count:
        found[space.sample(generator)] = None
    return list(found)


def fit_affine(sums: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Fit measured ≈ a · sum + b by least squares of relative errors, and return a and b.

    If the best a is not above 0, the sums predict nothing: then a is the ratio of the medians, and b is 0.

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
    """Return the relative error and rank correlation of predicted latencies.

    Example:
        >>> accuracy_of([1.0, 3.0, 3.0], [1.0, 2.0, 4.0]).mape
        0.25
    """
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    rank = rank_correlation(predicted, measured)
    return Accuracy(len(m), float(np.mean(np.abs(p - m) / m)), rank)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation, or 0 if either sequence is constant or empty."""
    from scipy.stats import spearmanr

    is_constant = len(set(predicted)) < 2 or len(set(measured)) < 2
    return 0.0 if is_constant else float(spearmanr(predicted, measured).statistic)
