"""A federation and the bare loop, a round each in turn: ``python -m benchmarks.turns W3``.

Both run in one process on one thread, so that whatever slows the machine down for a while slows
both. What the federation does from the end of one round to the end of the next is its own, with
Lightning's loops and the server's step. After every round the federation's aggregate is compared
with that of a third, untimed loop, whose mean is in double precision; then all go on from the
federation's weights, so that differences do not pile up.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import ours
from benchmarks.bare import PLAIN, BareLoop, best_variant
from benchmarks.options import Options, add_options
from benchmarks.plan import federation_plan
from benchmarks.workloads import WORKLOADS


@dataclass
class Turns:
    """What was seen, round by round, without the first.

    Attributes:
        best: the fastest variant of the bare loop.
        bare: seconds of the plain bare loop.
        bare_best: seconds of its fastest variant.
        ours: seconds of the federation.
        difference: the largest difference between an entry of the federation's and of the bare
            loop's aggregate in any round, as a share of that aggregate's largest entry.
    """

    best: str
    bare: list[float] = field(default_factory=list)
    bare_best: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    difference: float = 0.0


class TakeTurns(Callback):
    """Trains rounds of the bare loops after each of the federation's.

    Args:
        plain: timed.
        best: timed as well, if it is another one.
        exact: compared with.
        path: where the first process leaves what was seen; it may be a fork of this one.
    """

    def __init__(self, plain: BareLoop, best: BareLoop, exact: BareLoop, path: Path) -> None:
        self.plain, self.best, self.exact, self.path = plain, best, exact, path
        self.turns = Turns(best=str(best.variant))
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train the same round again; other processes, if there are any, wait meanwhile."""
        ours = time.perf_counter() - self._began
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._train_bare(trainer, pl_module, ours)
        trainer.strategy.barrier()
        self._began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave what was seen."""
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(asdict(self.turns)))

    def _train_bare(self, trainer: Trainer, module: LightningModule, ours: float) -> None:
        clients = trainer.datamodule.clients  # type: ignore[attr-defined]
        plan = federation_plan(self.plain.work, clients, trainer.current_epoch)
        before = [p.clone() for p in self.exact.start]
        bare = best = self.plain.train_round(plan)
        if self.best is not self.plain:
            best = self.best.train_round(plan)
        self.exact.train_round(plan)
        after = [p.detach() for p in module.parameters()]
        self._compare(before, after)
        for loop in (self.plain, self.best, self.exact):
            torch._foreach_copy_(loop.start, after)
        if trainer.current_epoch:  # the first one warms up
            self.turns.ours.append(ours)
            self.turns.bare.append(bare)
            self.turns.bare_best.append(best)

    def _compare(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        gaps = torch._foreach_norm(torch._foreach_sub(self.exact.start, after), torch.inf)
        moves = torch._foreach_norm(torch._foreach_sub(self.exact.start, before), torch.inf)
        share = torch.stack(gaps).max() / torch.stack(moves).max()
        so_far = torch.tensor(self.turns.difference)
        self.turns.difference = float(torch.maximum(share, so_far))  # a NaN stays and shows


def measure(name: str, options: Options) -> Turns:
    """Return what the rounds of one workload took."""
    torch.set_num_threads(1)
    work = options.workload(name)
    data = work.data()
    variant = best_variant(work, data, options.precision)
    plain = BareLoop(work, data, PLAIN, options.precision)
    best = plain if variant == PLAIN else BareLoop(work, data, variant, options.precision)
    exact = BareLoop(work, data, PLAIN, options.precision, mean_dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        turns = TakeTurns(plain, best, exact, Path(folder) / "turns.json")
        ours.fit(work, data, options, 1 + options.rounds, turns)
        return Turns(**json.loads(turns.path.read_text()))


def main() -> None:
    """Print what was seen as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    add_options(parser)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.workload, Options.of_arguments(arguments)))))


if __name__ == "__main__":
    main()
