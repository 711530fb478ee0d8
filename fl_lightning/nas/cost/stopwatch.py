"""Times the blocks of a network while the whole network runs, and the network as a whole.

A block that is timed alone finds its input in the cache and the processor to itself. So blocks are
timed where they stand: a stamp before and after each, in forward passes of the whole network. On a GPU
the stamps are events of the stream; on a CPU they are readings of the clock.

A time is the median, over visits, of the shortest of a visit's passes: other programs only ever add
to a pass, and visits are spread over the whole measurement.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pace:
    """How often things are timed.

    Attributes:
        warmup: passes of every network that are not counted.
        rounds: how often all networks are visited, one after the other: what slows the device down
            for a while slows all of them.
        passes: timed passes a visit, after one that is not counted.
    """

    warmup: int = 3
    rounds: int = 10
    passes: int = 4


def device_name(device: torch.device) -> str:
    """Return the name of a device, as its vendor has it.

    Example:
        >>> len(device_name(torch.device("cpu"))) > 0
        True
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def time_networks(
    networks: Sequence[nn.Module], image: Tensor, pace: Pace, say: Callable[[str], None]
) -> list[float]:
    """Return the milliseconds of a pass of each network.

    Args:
        networks: in evaluation mode, on the image's device.
        image: a batch.
        pace: of the timing.
        say: is told how far it is.
    """
    timed: list[list[float]] = [[] for _ in networks]

    def visit(number: int) -> None:
        timed[number].append(min(_pass(networks[number], image) for _ in range(pace.passes)))

    _visit_all(len(networks), networks, image, pace, visit, say)
    return [median(times) for times in timed]


def time_blocks(
    networks: Sequence[nn.Module],
    blocks: Sequence[Mapping[nn.Module, str]],
    image: Tensor,
    pace: Pace,
    say: Callable[[str], None],
) -> tuple[dict[str, float], float]:
    """Return the milliseconds of each kind of block, and of the rest of a network.

    Args:
        networks: in evaluation mode, on the image's device.
        blocks: of each network, with the names of their kinds; a kind may stand in several places.
        image: a batch.
        pace: of the timing.
        say: is told how far it is.
    """
    timed: dict[str, list[float]] = {}
    rest: list[float] = []

    def visit(number: int) -> None:
        kinds = blocks[number]
        passes = [_pass_with_stamps(networks[number], kinds, image) for _ in range(pace.passes)]
        for module, kind in kinds.items():
            timed.setdefault(kind, []).append(min(times[module] for times, _ in passes))
        rest.append(min(whole - sum(times.values()) for times, whole in passes))

    _visit_all(len(networks), networks, image, pace, visit, say)
    return {kind: median(times) for kind, times in timed.items()}, median(rest)


def _visit_all(
    count: int,
    networks: Sequence[nn.Module],
    image: Tensor,
    pace: Pace,
    visit: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    with torch.inference_mode():
        for network in networks:
            for _ in range(pace.warmup):
                network(image)
        for round_ in range(pace.rounds):
            for number in range(count):
                networks[number](image)  # the network before it filled the cache
                visit(number)
            say(f"round {round_ + 1} of {pace.rounds}")


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


def _pass(network: nn.Module, image: Tensor) -> float:
    _wait(image.device)
    before = time.perf_counter()
    network(image)
    _wait(image.device)
    return 1e3 * (time.perf_counter() - before)


def _pass_with_stamps(
    network: nn.Module, blocks: Mapping[nn.Module, str], image: Tensor
) -> tuple[dict[nn.Module, float], float]:
    """Return the milliseconds of every block, each of which runs once, and of the pass."""
    device, begun = image.device, {}
    stamps: list[tuple[nn.Module, Any, Any]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        begun[module] = _stamp(device)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        stamps.append((module, begun[module], _stamp(device)))

    handles = [module.register_forward_pre_hook(before) for module in blocks]
    handles += [module.register_forward_hook(after) for module in blocks]
    try:
        whole = _pass(network, image)
    finally:
        for handle in handles:
            handle.remove()
    return {module: _milliseconds(start, end) for module, start, end in stamps}, whole
