"""Other frameworks on the same workloads, each in an environment of its own.

One adapter a file, run as ``python -m benchmarks.rivals.<name> <workload>`` under ``uv run
--isolated`` with the pins below. It takes data, network and steps from `benchmarks.workloads`, does
the rest as its framework's own examples do, and prints one line of JSON, a `process.Column`. After
each of its rounds the plain bare loop trains one in the same process: their ratio is the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import cast

from benchmarks import process
from benchmarks.bare import BareLoop, Data, own_plan
from benchmarks.options import Options, add_options
from benchmarks.process import Column, Stopwatch, cpu_seconds
from benchmarks.workloads import WORKLOADS, Workload

TORCH = "torch==2.15.0"  # for the data and the initial weights, also where nothing else needs it
# of each rival: the version of Python, and what is installed
RIVALS: dict[str, tuple[str, list[str]]] = {
    "pfl": ("3.11", ["pfl==0.6.0", TORCH]),
    "blazefl": ("3.13", ["blazefl==2.0.3", "numpy==2.4.6", "tqdm", TORCH]),
    "flwr": ("3.11", ["flwr[simulation]==1.41.0", TORCH]),
    "fedjax": (
        "3.11",
        # its last release: what of JAX was current then, and what that goes with
        [
            "fedjax==0.0.17",
            "jax==0.4.13",
            "jaxlib==0.4.13",
            "dm-haiku==0.0.10",
            "optax==0.1.5",
            "chex<0.1.82",
            "numpy<1.25",
            "scipy<1.11",
            "typing-extensions",
            TORCH,
        ],
    ),
}
TIMEOUT = 1800.0  # seconds, with the installation


def run(name: str, workload: str, options: Options) -> Column:
    """Return a rival's column.

    Raises:
        MeasurementError: if it cannot be installed, does not support the workload, or fails.
    """
    python, pins = RIVALS[name]
    environment = [word for pin in pins for word in ("--with", pin)]
    command = ["uv", "run", "--isolated", "--no-project", "--python", python, *environment]
    module = ["python", "-m", f"benchmarks.rivals.{name}", workload]
    return cast(Column, process.run([*command, *module, *options.as_arguments()], TIMEOUT))


def stopwatch(work: Workload, data: Data, *, in_one_process: bool = True) -> Stopwatch:
    """Return a stopwatch that has the bare loop train a round after each of the rival's.

    Args:
        work: what both train.
        data: its examples.
        in_one_process: whether the rival computes in this process alone. Then seconds are those that it
            computes, otherwise those of the clock on the wall.
    """
    loop, rounds = BareLoop(work, data), itertools.count()
    clock = cpu_seconds if in_one_process else time.monotonic

    def train_bare() -> float:
        plan = own_plan(work, next(rounds))
        began = clock()
        loop.train_round(plan)
        return clock() - began

    return Stopwatch(train_bare, cpu_seconds if in_one_process else None)


def adapter(train: Callable[[Workload, int], Column]) -> None:
    """Do what the command line says and print the column.

    Args:
        train: trains so many rounds of a workload.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    add_options(parser)
    arguments = parser.parse_args()
    options = Options.of_arguments(arguments)
    if options.devices > 1 or options.precision != "32-true":
        parser.exit(1, "compared in one process and 32-true only\n")
    column = train(options.workload(arguments.workload), 1 + options.rounds)
    print(json.dumps(column))
