"""A federation or a bare loop in a process of its own: ``python -m benchmarks.alone ours W3``.

Measures what only a fresh process can: the seconds that are paid once, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.bare import VARIANTS, Variant, own_plan
from benchmarks.engineered import loop_for
from benchmarks.options import Options, add_options
from benchmarks.process import Column, Stopwatch, cpu_seconds
from benchmarks.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def bare(work: Workload, options: Options, variant: Variant) -> Column:
    """Train rounds of the bare loop."""
    stopwatch = Stopwatch(clock=_clock(options))
    loop = loop_for(work, work.data(), variant, options.precision, device=options.device)
    for round_index in range(1 + options.rounds):
        loop.train_round(own_plan(work, round_index))
        stopwatch.round_done()
    return stopwatch.report()


def ours(work: Workload, options: Options) -> Column:
    """Train rounds of a federation; of several processes, which may be forks, the first reports."""
    # not above: the bare loop's process must not pay for Lightning
    from lightning.pytorch.callbacks import LambdaCallback

    from benchmarks.ours import fit

    stopwatch = Stopwatch(clock=_clock(options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "column.json"

        def leave(trainer: Trainer, *_: object) -> None:
            if trainer.is_global_zero:
                path.write_text(json.dumps(stopwatch.report()))

        watch = LambdaCallback(
            on_train_epoch_end=lambda *_: stopwatch.round_done(), on_train_end=leave
        )
        fit(work, work.data(), options, 1 + options.rounds, watch)
        column: Column = json.loads(path.read_text())
        return column


def _clock(options: Options) -> Callable[[], float] | None:
    """Return the CPU's clock, where one process does everything: who else has the CPU does not count."""
    return cpu_seconds if options.device == "cpu" and options.devices == 1 else None


def main() -> None:
    """Print the column as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("column", choices=["bare", "ours"])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--variant", choices=VARIANTS, default="sgd", help="of the bare loop")
    add_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = Options.of_arguments(arguments)
    work = options.workload(arguments.workload)
    variant = VARIANTS[arguments.variant]
    column = bare(work, options, variant) if arguments.column == "bare" else ours(work, options)
    print(json.dumps(column))


if __name__ == "__main__":
    main()
