"""Whether a search pays: its cell against random cells, all trained from scratch in the same way.

    python -m benchmarks.search

For each seed the search of a configuration runs; then its cell and random cells of the space are trained
on scikit-learn's digits with equal steps (SGD, cosine, batches of 64), each from the same seed. Training is
short: after 8 epochs all cells but the empty one have 97 to 99 % of the 359 test digits right.
Source: Li & Talwalkar 2019; Yang et al. 2020, on what a search is to be compared with.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.seeds import torch_generator
from fl_lightning.data import Digits
from fl_lightning.nas import NASBench201

CONFIG = Path(__file__).parents[1] / "configs" / "nas" / "quickstart.yaml"


class Result(NamedTuple):
    """Of one seed; accuracies are fractions of the test digits.

    Attributes:
        cell: that the search has found.
        seconds: of CPU that it took, all processes together.
        found: accuracy of the cell.
        random: accuracies of random cells.
    """

    cell: str
    seconds: float
    found: float
    random: list[float]


def search(seed: int, options: list[str]) -> tuple[str, float]:
    """Return the cell that a search finds, and its seconds of CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fl_lightning", "fit", "--config", str(CONFIG)]
        command += ["--seed_everything", str(seed), "--test_after_fit", "false", *options]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)
        [file] = Path(folder).rglob("architecture.yaml")
        cell = yaml.safe_load(file.read_text())["architecture"]
    return cell, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def examples(data: Digits) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels to train on, and to test on."""
    data.setup()
    loaders = data.train_dataloader(), data.test_dataloader()
    train, test = ([torch.cat(part) for part in zip(*loader, strict=True)] for loader in loaders)
    return (train[0], train[1]), (test[0], test[1])


def retrained(cell: str, seed: int, *, epochs: int, channels: int = 8) -> float:
    """Return the test accuracy of a cell's network, trained from scratch."""
    (x, y), (test_x, test_y) = examples(Digits(batch_size=64, seed=seed))
    torch.manual_seed(seed)
    space = NASBench201()
    network: nn.Module = space.build(
        space.parse(cell), num_classes=10, in_channels=1, channels=channels, cells=1
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=3e-4)
    order = torch_generator(seed, "batches")
    steps = epochs * (len(x) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(64):
            if len(batch) < 64:
                continue
            optimizer.zero_grad()
            functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    network.eval()
    with torch.no_grad():
        return float((network(test_x).argmax(1) == test_y).float().mean())


def results(
    seeds: list[int], *, num_random: int, epochs: int, options: list[str]
) -> Iterator[Result]:
    """Yield what each seed gives."""
    space = NASBench201()
    for seed in seeds:
        cell, seconds = search(seed, options)
        draws = torch_generator(seed, "random cells")
        cells = [str(space.sample(draws)) for _ in range(num_random)]
        accuracies = [retrained(other, seed, epochs=epochs) for other in cells]
        yield Result(cell, seconds, retrained(cell, seed, epochs=epochs), accuracies)


def main() -> None:
    """Print a row a seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random", type=int, default=10, help="cells to compare with")
    parser.add_argument("--epochs", type=int, default=3, help="of training from scratch")
    args, options = parser.parse_known_args()
    torch.set_num_threads(1)
    print(f"{'seed':>4} {'CPU s':>6} {'found':>7} {'median':>7} {'best':>7}  cell")
    rows: list[tuple[float, ...]] = []
    for result in results(args.seeds, num_random=args.random, epochs=args.epochs, options=options):
        row = (result.found, median(result.random), max(result.random))
        print(f"{args.seeds[len(rows)]:>4} {result.seconds:>6.0f}", end="")
        print("".join(f" {value:>7.1%}" for value in row), "", result.cell, flush=True)
        rows.append(row)
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    print("mean" + " " * 7 + "".join(f" {value:>7.1%}" for value in means))


if __name__ == "__main__":
    main()
