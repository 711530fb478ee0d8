"""What a masked optimizer costs and saves: ``python -m benchmarks.sparse_step``.

A ViT-S/16 of 21.7 million parameters, one thread. Optimizers take turns on the same parameters and
gradients, each of them right after the dense one it is compared with; times are process CPU time.
Of all turns the table shows the median ratio and the ratio of the fastest steps: gathering few of
many numbers suffers more than a dense pass from whoever else uses the machine's memory.
The last line is a whole training step of the ViT on small images, with the first six of twelve
blocks frozen because their masks are all zero, against the same step with all blocks training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from fl_lightning.sparsity.masks.maskable import freeze_masked
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW, SparseSGDM

Step = Callable[[], object]
RUN = 64  # entries that are active or frozen together, where a mask is clustered


def random_mask(param: Tensor, density: float) -> Tensor:
    return torch.rand(param.shape) < density


def clustered_mask(param: Tensor, density: float) -> Tensor:
    """Return a mask of runs of `RUN` neighbours."""
    runs = torch.rand(-(-param.numel() // RUN)) < density
    return runs.repeat_interleave(RUN)[: param.numel()].view(param.shape)


@dataclass(frozen=True)
class Ratio:
    """CPU time of one step as a multiple of another's."""

    median: float
    fastest: float
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.milliseconds:9.1f} ms{self.median:9.2f}{self.fastest:9.2f}"


def compare(step: Step, other: Step, turns: int) -> Ratio:
    """Return the time of a step relative to another's, which takes turns with it."""
    seconds = np.array([[_seconds(other), _seconds(step)] for _ in range(turns + 2)])[2:]
    fastest = seconds.min(axis=0)
    return Ratio(
        median=float(np.median(seconds[:, 1] / seconds[:, 0])),
        fastest=float(fastest[1] / fastest[0]),
        milliseconds=float(np.median(seconds[:, 1])) * 1e3,
    )


def _seconds(step: Step) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def bytes_of_state(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return bytes of the state's values, and of these with the masks' indices."""
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    masks = [g.get(kind, []) for g in optimizer.param_groups for kind in ("active", "frozen")]
    indices = [index for group in masks for index in group if index is not None]
    values = sum(t.nbytes for t in tensors)
    return values, values + sum(index.nbytes for index in indices)


def report_steps(network: str, density: float, turns: int) -> None:
    """Print the table of optimizer steps and of their state."""
    params = list(timm.create_model(network, num_classes=100).parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    spread = [random_mask(p, density) for p in params]
    clustered = [clustered_mask(p, density) for p in params]
    sgd: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-3}
    adamw: dict[str, Any] = {"lr": 1e-4}

    fused = torch.optim.SGD(params, **sgd, fused=True)
    foreach = torch.optim.SGD(params, **sgd, foreach=True)
    sparse = SparseSGDM(params, **sgd, masks=spread)
    runs = SparseSGDM(params, **sgd, masks=clustered)
    fused_adamw = torch.optim.AdamW(params, **adamw, fused=True)
    sparse_adamw = SparseAdamW(params, **adamw, fused=True, masks=spread)
    pairs = {
        "SparseSGDM, random mask, of fused SGD": (sparse, fused),
        "SparseSGDM, clustered mask, of fused SGD": (runs, fused),
        "SparseSGDM, random mask, of foreach SGD": (sparse, foreach),
        "SparseAdamW, random mask, of fused AdamW": (sparse_adamw, fused_adamw),
    }
    print(f"{'density ' + format(density, '.0%'):42}{'step':>12}{'median':>9}{'fastest':>9}")
    for name, (ours, dense) in pairs.items():
        print(f"{name:42}{compare(ours.step, dense.step, turns)}")
    print(f"{'state, of dense':42}{'values':>12}{'with indices':>18}")
    for name, (ours, dense) in list(pairs.items())[::3]:
        size, (values, total) = bytes_of_state(dense)[0], bytes_of_state(ours)
        print(f"{name.split(',')[0]:42}{values / size:12.1%}{total / size:18.1%}")


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Return a whole step: forward, backward, SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def report_frozen_blocks(network: str, turns: int) -> None:
    """Print what a training step gains when the masks of six of twelve blocks are all zero."""
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(100, (8,))
    models = [timm.create_model(network, num_classes=100, img_size=64) for _ in range(2)]
    first = ("patch_embed", "pos_embed", "cls_token", *(f"blocks.{i}." for i in range(6)))
    named = models[1].named_parameters()
    masks = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in named if n.startswith(first)}
    freeze_masked(models[1], masks)
    dense, frozen = (training_step(model, images, labels) for model in models)
    ratio = compare(dense, frozen, turns)
    print(f"{'training step, of one with 6 blocks frozen':42}{ratio}")


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=25, help="steps of each optimizer")
    parser.add_argument(
        "--network", default="vit_small_patch16_224", help="timm's name of a ViT: %(default)s"
    )
    parser.add_argument("--density", type=float, default=0.1, help="fraction that may move")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report_steps(arguments.network, arguments.density, arguments.turns)
    report_frozen_blocks(arguments.network, max(1, arguments.turns // 3))


if __name__ == "__main__":
    main()
