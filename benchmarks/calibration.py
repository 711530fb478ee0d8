"""A pass of scoring against an epoch of training: ``python -m benchmarks.calibration``.

The same network, examples and batch size: an epoch of plain SGD, and one round of a mask's
calibration (per-example gradients of a sampled label each, and the choice of the entries), which
alternate in one process on one thread. Scored as the estimator chooses, and example by example.
Below, what choosing a tenth of the entries of a ViT-S takes, a twentieth of which are equal, and a
stable sort of them. Times are process CPU time, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from benchmarks.networks import tiny_vit
from fl_lightning.models import LeNet
from fl_lightning.sparsity import LeastSensitive, SampledFisher, Scoring, calibrate
from fl_lightning.sparsity.calibration.rules import keep_lowest

VIT_S_ENTRIES = 21_700_000


@dataclass(frozen=True)
class Workload:
    """A network, its number of examples in batches of 32, 32×32×3 pixels each."""

    name: str
    network: Callable[[], nn.Module]
    num_examples: int


def quickstart_vit() -> nn.Module:
    """Return the transformer of the quickstart, for these images."""
    import timm

    network: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4
    )
    return network


def vit_s() -> nn.Module:
    """Return a ViT-S for small images: 21.4 million parameters."""
    import timm

    network: nn.Module = timm.create_model("vit_small_patch16_224", img_size=32, patch_size=4)
    return network


WORKLOADS = [
    Workload("LeNet", lambda: LeNet(10, 3, 32), 256),
    Workload("ViT, dim 64, depth 3", quickstart_vit, 256),
    Workload("ViT, dim 192, depth 6", partial(tiny_vit, depth=6), 64),
    Workload("ViT-S", vit_s, 32),
]


def seconds(function: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    function()
    return time.process_time() - began


def train(network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take an epoch of SGD; its learning rate of nothing keeps the network."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-12, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def measure(work: Workload, turns: int) -> list[float]:
    """Return medians of seconds of an epoch, of a round of calibration, and of it one by one."""
    network = work.network()
    x = torch.randn(work.num_examples, 3, 32, 32)
    batches = list(zip(x.split(32), torch.randint(10, (len(x),)).split(32), strict=True))

    def score(scoring: Scoring) -> None:
        estimator = SampledFisher(scoring=scoring)
        rule = LeastSensitive()
        calibrate(network, batches, density=0.1, rounds=1, rule=rule, sensitivity=estimator)

    calls: list[Callable[[], object]] = [
        lambda: train(network, batches),
        lambda: score(Scoring()),
        lambda: score(Scoring(memory_limit=1)),
    ]
    times = [[seconds(call) for call in calls] for _ in range(1 + turns)][1:]  # the first warms up
    return [median(column) for column in zip(*times, strict=True)]


def selection(turns: int) -> tuple[float, float]:
    """Return medians of seconds of choosing a tenth of a ViT-S's entries, and of sorting them."""
    values = torch.rand(VIT_S_ENTRIES) ** 4
    values[torch.rand(VIT_S_ENTRIES) < 0.05] = 0
    allowed = torch.ones(VIT_S_ENTRIES, dtype=torch.bool)
    chosen = [
        seconds(lambda: keep_lowest(values, allowed, len(values) // 10)) for _ in range(turns)
    ]
    return median(chosen), median(seconds(lambda: values.sort(stable=True)) for _ in range(turns))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="times each is measured: %(default)s")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'seconds':24}{'examples':>9}{'epoch':>9}{'scoring':>9}{'ratio':>7}{'one by one':>12}")
    for work in WORKLOADS:
        epoch, scoring, single = measure(work, turns)
        ratio = f"{scoring / epoch:.2f}"
        print(
            f"{work.name:24}{work.num_examples:9}{epoch:9.3f}{scoring:9.3f}{ratio:>7}{single:12.3f}"
        )
    chosen, sorted_ = selection(turns)
    print(f"{VIT_S_ENTRIES:,} entries: chosen in {chosen:.2f} s, sorted in {sorted_:.2f} s")


if __name__ == "__main__":
    main()
