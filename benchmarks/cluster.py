"""What a round costs, from a laptop to a cluster: ``python -m benchmarks.cluster``.

    seconds = C (s + c + u k) / P + w + r k + x k [P > 1]
    bytes of a process = M + 4 m k + e E + n N + 4 h k N
    bytes that travel = 4 k C up, and as many down

C clients of a cohort of N, of E examples; k parameters; P processes. Measured here, on one thread, by runs of
a few seconds in processes of their own: s, the local steps of a client (of the model and its data: a
few steps of two clients are timed); c, what else a client costs, and u, the same for a parameter (its start,
delta, norm, mean); w, what a round costs, and r, the same for a parameter (the server's step); x, the sum over
processes; M, m, n, e. h is 1 for corrections with a memory of each client (SCAFFOLD, FedDyn), else 0.

Then rounds of other workloads are estimated from steps of two clients, and trained. Last, a table of what
the formulas say of larger federations. Seconds are those that the process computes.

With ``--dry_run`` it prints for some configurations the estimate of ``fit --dry_run true``, the seconds of the fit,
and their ratio.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from multiprocessing import get_context
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from benchmarks import networks
from benchmarks.options import Options
from benchmarks.ours import fit
from benchmarks.process import peak_mb
from benchmarks.workloads import WORKLOADS, Workload
from fl_lightning.cli.commands import run_lightning
from fl_lightning.reports.overview import DryRun

FEW, MANY = 7_850, 7_850_000  # parameters of the two models that are compared
CROWD = 200_000  # clients whose memory is told from that of a few
ROUNDS = 4
CHECKED = "U-mlp", "T-mlp", "W3", "U-lenet5"
_QUICK = (
    *("--config=quickstart", "--trainer.devices=1", "--trainer.max_epochs=20"),
    *(
        "--trainer.logger=true",
        "--report=false",
        "--test_after_fit=false",
        "--trainer.enable_progress_bar=false",
    ),
)
_SEQUENTIAL = ("--federation.engine=sequential", "--federation.local_epochs=1")
DRY_RUNS = {
    "quickstart": _SEQUENTIAL,
    "60 of 100 clients": (
        *_SEQUENTIAL,
        *("--data.init_args.num_clients=100", "--federation.cohort.init_args.fraction=0.6"),
    ),
    "FedProx, top-k": (
        *_SEQUENTIAL,
        *("--federation.correction=FedProx", "--federation.updates+=TopK"),
        "--federation.updates.init_args.fraction=0.1",
    ),
    "central": ("--federation=null",),
}


@dataclass(frozen=True)
class Constants:
    """Constants of the formulas on this machine.

    Attributes:
        client: c, seconds.
        number: u, seconds of a parameter and client.
        fixed: w, seconds.
        server: r, seconds of a parameter.
        exchange: x, seconds of a parameter.
        base_mb: M.
        copies: m, of the model.
        of_client: n, bytes of a client that exists.
    """

    client: float
    number: float
    fixed: float
    server: float
    exchange: float
    base_mb: float
    copies: float
    of_client: float

    def seconds(self, clients: int, parameters: float, steps: float, processes: int = 1) -> float:
        """Return the seconds of a round; ``steps`` are those of a client's local steps."""
        shared = clients * (steps + self.client + self.number * parameters) / processes
        exchange = self.exchange * parameters if processes > 1 else 0.0
        return shared + self.fixed + self.server * parameters + exchange

    def gigabytes(
        self,
        population: float,
        parameters: float,
        example_bytes: float = 0,
        *,
        remember: bool = False,
    ) -> float:
        """Return the memory of a process."""
        memories = 4 * parameters * population if remember else 0.0
        model = 4 * self.copies * parameters
        clients = self.of_client * population
        return (self.base_mb * 1e6 + model + clients + example_bytes + memories) / 1e9


class Watch(Callback):
    """Notes the seconds of rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note a round."""
        self.seconds.append(time.process_time() - self._began)


class FitClock(Callback):
    """Measures the seconds of a fit, or takes the estimate of a dry run."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.thread_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.seconds = time.thread_time() - self._began

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the seconds by the estimate of a dry run."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, DryRun):
                self.seconds = callback.seconds


def seconds_of_fit(words: Sequence[str]) -> float:
    """Return the seconds of a fit of the command line, or the estimate of a dry run."""
    clock = FitClock()
    logging.disable(logging.INFO)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        run_lightning(["fit", *words, f"--trainer.default_root_dir={folder}"], [clock])
    return clock.seconds


def linear(parameters: int, cohort: int, *, steps: int = 1, population: int = 0) -> Workload:
    """Return a workload of one dense layer of so many parameters."""
    return Workload(
        title="one dense layer",
        network=partial(networks.logistic_regression, 784, parameters // 785),
        shape=(784,),
        num_classes=10,
        num_clients=population or cohort,
        examples=(20, 20),
        cohort=cohort,
        batch_size=20,
        local_steps=steps,
        pool=2000,
    )


def trained(work: Workload) -> tuple[float, float]:
    """Train some rounds, one client after the other; return seconds of the fastest, and peak MB."""
    watch = Watch()
    fit(work, work.data(), Options(engine="sequential"), ROUNDS, watch)
    return min(watch.seconds[1:]), peak_mb()


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function does in a process of its own, forked so that it need not import."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        return process.submit(function, *arguments).result()


def exchanged(rank: int, parameters: int, port: int) -> float:
    """Return the seconds of a sum over two processes."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    values, taken = torch.zeros(parameters), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        distributed.all_reduce(values)
        taken.append(time.perf_counter() - began)
    distributed.destroy_process_group()
    return min(taken)


def measured() -> Constants:
    """Return the constants of this machine."""
    small, base_mb = alone(trained, linear(FEW, 100))
    steps, _ = alone(trained, linear(FEW, 100, steps=11))
    of_two, _ = alone(trained, linear(FEW, 2))
    fixed = of_two - 2 * (small - of_two) / 98
    client = (small - fixed) / 100 - (steps - small) / 100 / 10
    few, many_mb = alone(trained, linear(MANY, 4))
    more, _ = alone(trained, linear(MANY, 12))
    of_more, _ = alone(trained, linear(MANY, 12, steps=3))
    step = (of_more - more) / 12 / 2
    number = ((more - few) / 8 - step - client) / MANY
    server = max(0.0, few - 4 * (more - few) / 8 - fixed) / MANY
    _, crowd_mb = alone(trained, linear(FEW, 100, population=CROWD))
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        exchange = max(pool.map(exchanged, (0, 1), (MANY, MANY), (29_611, 29_611))) / MANY
    copies = (many_mb - base_mb) * 1e6 / 4 / MANY
    of_client = (crowd_mb - base_mb) * 1e6 / CROWD
    return Constants(client, number, fixed, server, exchange, base_mb, copies, of_client)


def checked(name: str, constants: Constants) -> str:
    """Return the line of a workload: a round as estimated from steps of two clients, and as trained."""
    work = WORKLOADS[name]
    parameters = sum(p.numel() for p in work.network().parameters())
    few, more = (alone(trained, replace(work, cohort=2, local_steps=n))[0] for n in (2, 22))
    num_steps = mean(map(work.steps_of, range(min(1000, work.num_clients))))
    estimate = constants.seconds(work.cohort, parameters, num_steps * (more - few) / 40)
    found, _ = alone(trained, work)
    return f"{name:16}{parameters:12,}{work.cohort:8}{estimate:12.3f}{found:12.3f}{estimate / found:8.2f}"


def main() -> None:
    """Print constants, checks and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(CHECKED), help="default %(default)s")
    parser.add_argument("--dry_run", action="store_true", help="check fit --dry_run true instead")
    given = parser.parse_args()
    names = [name for name in given.workloads.split(",") if name]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if given.dry_run:
        print(f"{'':20}{'estimate s':>12}{'trained s':>12}{'ratio':>8}")
        for name, own in DRY_RUNS.items():
            words = [*_QUICK, *own]
            estimate = alone(seconds_of_fit, [*words, "--dry_run=true"])
            found_seconds = alone(seconds_of_fit, words)
            ratio = estimate / found_seconds
            print(f"{name:20}{estimate:12.2f}{found_seconds:12.2f}{ratio:8.2f}", flush=True)
        return
    found = measured()
    print(
        f"c {1e3 * found.client:.2f} ms   u {1e9 * found.number:.2f} ns   w {1e3 * found.fixed:.1f} ms   "
        f"r {1e9 * found.server:.2f} ns   "
        f"x {1e9 * found.exchange:.2f} ns   M {found.base_mb:.0f} MB   m {found.copies:.1f}   "
        f"n {found.of_client:.0f} bytes",
        flush=True,
    )
    print(
        f"\n{'':16}{'parameters':>12}{'clients':>8}{'estimate s':>12}{'trained s':>12}{'ratio':>8}"
    )
    for name in names:
        print(checked(name, found), flush=True)
    print(
        f"\n{'clients':>12}{'parameters':>12}{'GB a process':>14}{'with memories':>15}{'GB sent':>10}"
    )
    for population in (1e4, 1e6, 1e8):
        for parameters in (1e7, 1e8, 1e9, 1e10):
            memory = found.gigabytes(population, parameters)
            remembering = found.gigabytes(population, parameters, remember=True)
            sent = 4e-9 * parameters * 1000
            print(
                f"{population:12.0e}{parameters:12.0e}{memory:14.3g}{remembering:15.3g}{sent:10.3g}"
            )


if __name__ == "__main__":
    main()
