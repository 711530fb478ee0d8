"""What choosing a cell of NAS-Bench-201 without any training is worth: best of a few random cells by a score.

    python -m benchmarks.zero_cost --root cifar10 --table table.csv

Random cells are scored once, in networks of the searches' size; then the best of 10 and of 100 of them by each
score is looked up in the table, 2,000 times. Printed is the mean and the standard deviation of its test accuracy on
CIFAR-10, as a table in Markdown, and the cell of 3×3 convolutions alone. These are the rows that a search that
trains has to beat.
Source: Abdelfattah et al. 2021; Krishnakumar et al. 2022, on parameters and FLOPs as scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import NASBench201
from fl_lightning.nas.search.proxies import PROXIES
from fl_lightning.nas.search.proxy_scores import MeanRank, ProxyScore, folder_batches
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table
from fl_lightning.nas.spaces.space import Architecture, Networks

SPACE = NASBench201()
NETWORKS = Networks(SPACE, 16, {"num_classes": 10, "in_channels": 3, "channels": 8, "cells": 1})
_REPEATS = 2000


def main() -> None:
    """Score cells, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--num", type=int, default=300, help="random cells that are scored")
    parser.add_argument("--scores", nargs="+", default=list(PROXIES), choices=PROXIES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch_generator(args.seed, "random cells")
    cells = list(dict.fromkeys(SPACE.sample(generator) for _ in range(args.num)))
    truth = NASBench201Table.read(args.table)
    accuracies = torch.tensor([truth.lookup(cell)["cifar10"] for cell in cells])
    batches = folder_batches([Path(args.root) / "train"], 32, NETWORKS, args.seed)

    def sizes(measure: str) -> Callable[[Architecture], float]:
        return lambda cell: float(getattr(NETWORKS.cost(cell), measure))

    scores: dict[str, Any] = {name: sizes(name) for name in ("params", "flops")}
    for name in args.scores:
        scores[name] = ProxyScore(name, NETWORKS, batches, args.seed)
    both = [scores["params"], scores[args.scores[0]]]
    scores[f"params+{args.scores[0]}"] = MeanRank(both, SPACE, seed=args.seed)
    scores["none"] = lambda cell: 0.0
    print("| score | best of 10 random cells | of 100 |\n|---|---|---|")
    for name, score in scores.items():
        values = torch.tensor([score(cell) for cell in cells], dtype=torch.float64)
        found = [_best_of(num, values, accuracies, generator) for num in (10, 100)]
        print(f"| {name} | {found[0]} | {found[1]} |", flush=True)
    cell = SPACE.parse(
        "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|nor_conv_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"
    )
    print(f"| 3x3 convolutions alone | {truth.lookup(cell)['cifar10']:.2f} | |")


def _best_of(
    num: int, scores: torch.Tensor, accuracies: torch.Tensor, generator: torch.Generator
) -> str:
    """Return mean ± deviation of the accuracy of the best of some cells by a score; draws break ties."""
    found = []
    for _ in range(_REPEATS):
        drawn = torch.randperm(len(scores), generator=generator)[:num]
        found.append(accuracies[drawn[scores[drawn].argmax()]])
    values = torch.stack(found)
    return f"{values.mean():.1f} ± {values.std():.1f}"


if __name__ == "__main__":
    main()
