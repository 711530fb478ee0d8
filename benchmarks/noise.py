"""What exact noise costs in time, and its grid in ε: ``python -m benchmarks.noise``.

First noise for a ViT-S/16 of 22 million numbers, one thread: kinds of noise take turns with float32 normals of
torch, and the table shows medians of the ratios. Then ε without a grid, and how much is added by what is
really done: clipped vectors are rounded at random to its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_lightning import (
    AllClients,
    BandedMatrixDP,
    CentralDP,
    DistributedDP,
    LocalDP,
    PoissonCohort,
)
from fl_lightning.core.seeds import Draw
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.kernels import rounded_gaussian
from fl_lightning.privacy.distributed import DistributedSkellam
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism
from fl_lightning.privacy.noise.grid import GRID_COST, Grid
from fl_lightning.privacy.noise.noise_source import NoiseSource

STDDEV_IN_STEPS, NUM_CLIENTS, ROUNDS, DELTA, NUM_NUMBERS = 2.0**26, 1000, 60, 1e-4, 14_000
Draws = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """A mechanism of the second table: its name, the cohort, and how it is made for a noise."""

    name: str
    cohort: Cohort
    made: Callable[[float], CentralDP | BandedMatrixDP | LocalDP | DistributedDP]
    noise: float

    def mechanism(self, noise: float) -> Mechanism[Any]:
        """Return the mechanism of a run."""
        run = AccountedRun(self.cohort, NUM_CLIENTS, ROUNDS, seed=0, num_coordinates=NUM_NUMBERS)
        mechanism: Mechanism[Any] = self.made(noise).mechanism(run)
        return mechanism

    def row(self) -> str:
        """Return the table's row."""
        on_grid = self.mechanism(self.noise)
        rounding, step = GRID_COST, Grid.of(1.0, NUM_NUMBERS).step
        if isinstance(on_grid, DistributedSkellam):
            rounding, step = on_grid.rounding, on_grid.step(clip_norm=1.0)
        plain = self.mechanism(self.noise * rounding).epsilon(ROUNDS)
        cost = max(0.0, on_grid.epsilon(ROUNDS) - plain)
        return f"{self.name:<28}{self.noise:>8.3g}{step:>12.2g}{plain:>12.6f}{cost:>12.1g}"


def setting(name: str, cohort: Cohort, kind: type, noise: float, **options: object) -> Setting:
    """Return a mechanism whose clip norm is 1."""
    return Setting(
        name,
        cohort,
        lambda z: kind(clip_norm=1.0, noise_multiplier=z, delta=DELTA, **options),
        noise,
    )


SETTINGS = [
    setting("CentralDP, Poisson", PoissonCohort(fraction=0.1), CentralDP, 0.7),
    setting("CentralDP, all", AllClients(), CentralDP, 8.0),
    setting("BandedMatrixDP, in turns", RoundRobinCohort(size=100), BandedMatrixDP, 2.0),
    setting("LocalDP, all", AllClients(), LocalDP, 20.0),
    setting("DistributedDP, all", AllClients(), DistributedDP, 20.0),
]


def speed(size: int, turns: int) -> None:
    """Print the first table."""
    secure, seeded = NoiseSource(), NoiseSource(0)
    kinds: dict[str, Draws] = {
        "on the grid, secure words": lambda: rounded_gaussian(
            STDDEV_IN_STEPS, size, secure.stream()
        ),
        "of these: secure words": lambda: words_of(secure.stream(), size),
        "on the grid, words of a seed": lambda: rounded_gaussian(
            STDDEV_IN_STEPS, size, seeded.stream()
        ),
    }
    print(f"{f'noise, {size:,} numbers':<32}{'ns a number':>12}{'of float32':>12}")
    plain: list[float] = []
    for name, draw in kinds.items():
        pairs = np.array(
            [[_seconds(lambda: torch.randn(size)), _seconds(draw)] for _ in range(turns)]
        )
        plain += pairs[:, 0].tolist()
        ratio = float(np.median(pairs[:, 1] / pairs[:, 0]))
        print(f"{name:<32}{np.median(pairs[:, 1]) / size * 1e9:>12.1f}{ratio:>12.2f}")
    print(f"{'float32 of torch':<32}{np.median(plain) / size * 1e9:>12.1f}{1.0:>12.2f}")


def words_of(draw: Draw, size: int) -> None:
    """Draw the words of so many numbers, as many at a time as they take."""
    for _ in range(0, size, 2**16):
        draw(2 * 2**16)


def _seconds(draw: Draws) -> float:
    began = time.perf_counter()
    draw()
    return time.perf_counter() - began


def costs() -> None:
    """Print the second table."""
    print(f"{'mechanism':<28}{'z':>8}{'step / S':>12}{'ε':>12}{'grid adds':>12}")
    for row in SETTINGS:
        print(row.row())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=22_000_000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed(options.size, options.turns)
    costs()
