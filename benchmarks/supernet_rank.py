"""Whether a supernet ranks cells as the truth does: single-path training, then 200 random cells.

    python -m benchmarks.supernet_rank --root cifar10 --table table.csv --seed 0

Every step trains one cell, drawn uniformly, in weights that all share. Then cells are scored by their
accuracy, and by minus their loss, on 2,000 images that were held out, with the statistics of batches of 250. The
Spearman correlation with a table of NAS-Bench-201 is printed as a line of JSON, several times while
training goes on, beside that of the number of multiply-adds and of parameters: a score that ranks no
better than these says nothing. ``best`` is the table's accuracy of the cell of the lowest loss.
Source: Guo et al. 2020, Single Path One-Shot; Yu et al. 2020, on rank correlations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.seeds import torch_generator
from fl_lightning.data import ImageFolder
from fl_lightning.nas import NASBench201, SinglePath
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.relaxation import weights_of
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table
from fl_lightning.nas.spaces.space import Architecture

SPACE = NASBench201()


class Ranked:
    """A supernet, and the data that it learns from and is rated on.

    Args:
        root: folder of images.
        image_size: in pixels.
        channels: of the first cells.
        cells: a stage.
        seed: of everything.
    """

    def __init__(self, root: str, *, image_size: int, channels: int, cells: int, seed: int) -> None:
        self.data: Any = ImageFolder(
            root, image_size=image_size, batch_size=64, val_fraction=0.2, seed=seed
        )
        self.data.setup()
        torch.manual_seed(seed)
        self.shape = {"num_classes": 10, "in_channels": 3, "channels": channels, "cells": cells}
        self.image_size = image_size
        self.network: nn.Module = SPACE.network(SinglePath().edge, affine=False, **self.shape)
        self.alpha = torch.zeros(SPACE.num_rows, len(SPACE.operations))
        self._draws = torch_generator(seed, "drawn cells")
        images, labels = map(torch.cat, zip(*self.data.val_dataloader(), strict=True))
        # a folder's images stand class by class, and the statistics of one class tell nothing apart
        mixed = torch.randperm(len(images), generator=torch_generator(seed, "held out"))[:2000]
        self.held_out = images[mixed], labels[mixed]

    def logits(self, images: Tensor, cell: Architecture) -> Tensor:
        """Return those of a cell in the shared weights."""
        weights = weights_of(SPACE.operations_of(cell), self.alpha)
        return self.network(images, weights)  # type: ignore[no-any-return]

    def training(self, steps: int) -> Iterator[int]:
        """Train; yield the number of steps done at every tenth of them."""
        optimizer = torch.optim.SGD(
            self.network.parameters(), lr=0.05, momentum=0.9, weight_decay=3e-4
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        done = 0
        while done < steps:
            for images, labels in self.data.train_dataloader():
                optimizer.zero_grad()
                logits = self.logits(images, SPACE.sample(self._draws))
                functional.cross_entropy(logits, labels).backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                done += 1
                if done % max(1, steps // 10) == 0:
                    yield done
                if done == steps:
                    return

    @torch.no_grad()
    def rated(self, cells: list[Architecture]) -> dict[str, dict[Architecture, float]]:
        """Return each cell's accuracy and minus its loss on held-out images."""
        images, labels = self.held_out
        found: dict[str, dict[Architecture, float]] = {"accuracy": {}, "loss": {}}
        for cell in cells:
            logits = torch.cat([self.logits(batch, cell) for batch in images.split(250)])
            found["accuracy"][cell] = float((logits.argmax(1) == labels).float().mean())
            found["loss"][cell] = -float(functional.cross_entropy(logits, labels))
        return found

    def sizes(self, cells: list[Architecture]) -> dict[str, dict[Architecture, float]]:
        """Return each cell's cost."""
        costs = {c: SPACE.cost(c, side=self.image_size, **self.shape) for c in cells}
        return {
            "flops": {cell: float(one.flops) for cell, one in costs.items()},
            "params": {cell: float(one.params) for cell, one in costs.items()},
        }


def main() -> None:
    """Train, and print correlations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=200, help="random cells to rank")
    parser.add_argument("--steps", type=int, default=3000, help="of training")
    parser.add_argument("--rate", type=int, nargs="+", default=[3, 10], help="at which tenths")
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--cells", type=int, default=1, help="a stage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    table = NASBench201Table.read(args.table)
    ranked = Ranked(
        args.root,
        image_size=args.image_size,
        channels=args.channels,
        cells=args.cells,
        seed=args.seed,
    )
    draws = torch_generator(args.seed, "random cells")
    cells = list(dict.fromkeys(SPACE.sample(draws) for _ in range(args.num)))
    truth = [table.lookup(cell)["cifar10"] for cell in cells]

    def ranks_of(scores: Mapping[str, Mapping[Architecture, float]]) -> dict[str, float]:
        values = {name: [of[cell] for cell in cells] for name, of in scores.items()}
        return {name: rank_correlation(given, truth) for name, given in values.items()}

    sizes = ranks_of(ranked.sizes(cells))
    for done in ranked.training(args.steps):
        if done // max(1, args.steps // 10) not in args.rate:
            continue
        scores = ranked.rated(cells)
        ranks = ranks_of(scores)
        best = max(cells, key=lambda cell: scores["loss"][cell])
        result = {
            "seed": args.seed,
            "steps": done,
            "cells": len(cells),
            **{name: round(value, 3) for name, value in {**ranks, **sizes}.items()},
            "best_estimate": round(max(scores["accuracy"].values()), 3),
            "best": table.lookup(best)["cifar10"],
            "seconds": round(time.process_time() - began, 1),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
