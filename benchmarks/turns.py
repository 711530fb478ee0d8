"""A federation and bare loops in turn: ``python -m benchmarks.turns W3``.

All run in one process on one thread, so that whatever slows the machine down for a while slows all. A
turn is a round, or several where rounds are short. What the federation does from the end of one round to the
end of the next is counted as its own, with Lightning's loops and the server's step. All loops train every round
from the federation's weights, so that differences do not pile up.

First the variants of the bare loop are compared. Then runs of several lengths are measured, the longest
first: the plain loop and the fastest one take turns with its rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import ours
from benchmarks.bare import PLAIN, VARIANTS, BareLoop, Visit, clock_for, own_plan, wait_for
from benchmarks.engineered import compare_variants, largest_difference, loop_for
from benchmarks.options import Options, add_options
from benchmarks.plan import federation_plan
from benchmarks.workloads import WORKLOADS
from fl_lightning.data.shards import FlatShards

# A turn of the plain loop takes about so long, or has so many rounds.
_SECONDS_OF_A_TURN = 1.0
_MOST_ROUNDS_OF_A_TURN = 20


@dataclass
class Turns:
    """Seconds of rounds in turn, without the first.

    Attributes:
        engine: how the federation trained its clients.
        difference: the largest difference between an entry of the federation's and of the plain loop's
            aggregate in the first round of a turn, as a share of the largest change. The loop's mean is
            then in double precision.
        ours: seconds of the federation.
        plain: seconds of the plain bare loop.
        best: seconds of its fastest variant.
    """

    engine: str = ""
    difference: float = 0.0
    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """A round of the federation, for the loops to train as well.

    Attributes:
        index: index of the round.
        before: global weights at its start.
        after: global weights at its end.
        seconds: seconds of the federation.
    """

    index: int
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    seconds: float


class TakeTurns(Callback):
    """Trains the federation's rounds by bare loops too, a turn each.

    Args:
        timed: loops, by the attribute of `Turns` for their seconds.
        exact: the loop to compare with.
        rounds: rounds of a turn; the first turn, which warms up, has one.
        path: where the first process, which may be a fork of this one, saves the result.
        clock: the federation's.
        seconds: time after which no further turn begins.
    """

    def __init__(
        self,
        timed: Mapping[str, BareLoop],
        exact: BareLoop,
        rounds: int,
        path: Path,
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        self._clock, self._seconds, self._born = clock, seconds, time.perf_counter()
        self.timed, self.exact = timed, exact
        self.rounds, self.path = rounds, path
        self.turns = Turns()
        self._turn: list[Round] = []
        self._before: list[torch.Tensor] = []
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._before = _weights(pl_module)
        self._began = self._clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note a round; after a turn's last one the loops train, while other processes wait."""
        wait_for(pl_module.device.type)
        seconds, after = self._clock() - self._began, _weights(pl_module)
        self._turn.append(Round(trainer.current_epoch, self._before, after, seconds))
        self._before = after
        if trainer.current_epoch % self.rounds == 0:
            trainer.strategy.barrier()
            if trainer.is_global_zero:
                clients = trainer.datamodule.clients  # type: ignore[attr-defined]
                self._train_bare(clients, is_warm=trainer.current_epoch > 0)
            trainer.strategy.barrier()
            self._turn = []
            if self.turns.ours and time.perf_counter() - self._born > self._seconds:
                trainer.should_stop = True
        self._began = self._clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the result."""
        if trainer.is_global_zero:
            self.turns.engine = ours.engine_of(trainer)
            self.path.write_text(json.dumps(asdict(self.turns)))

    def _train_bare(self, clients: FlatShards, *, is_warm: bool) -> None:
        loops = dict.fromkeys(self.timed.values())  # the plain one may be the best
        plans = [federation_plan(self.exact.work, clients, each.index) for each in self._turn]
        seconds = {loop: [*map(partial(_train, loop), self._turn, plans)] for loop in loops}
        self._compare(self._turn[0], plans[0])
        if is_warm:
            self.turns.ours += [each.seconds for each in self._turn]
            for name, loop in self.timed.items():
                getattr(self.turns, name).extend(seconds[loop])

    def _compare(self, each: Round, plan: Sequence[Visit]) -> None:
        _train(self.exact, each, plan)
        share = largest_difference(each.after, self.exact.start, each.before)
        so_far = torch.tensor(self.turns.difference)
        self.turns.difference = float(torch.maximum(torch.tensor(share), so_far))  # a NaN stays


def _weights(module: LightningModule) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def _train(loop: BareLoop, each: Round, plan: Sequence[Visit]) -> float:
    """Train a round of the federation and return its seconds."""
    torch._foreach_copy_(loop.start, each.before)
    return loop.train_round(plan)


def rounds_of_a_turn(loop: BareLoop) -> int:
    """Return the number of rounds of a turn."""
    seconds = min(loop.train_round(own_plan(loop.work, number)) for number in range(2))
    return min(max(1, round(_SECONDS_OF_A_TURN / seconds)), _MOST_ROUNDS_OF_A_TURN)


def measure(name: str, options: Options, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the comparison of bare loops, and `Turns` by the length of the run."""
    torch.set_num_threads(1)
    work, device = options.workload(name), options.device
    data = work.data()
    variants = compare_variants(work, data, options.precision, device, options.seconds / 2)
    plain, exact = (
        BareLoop(work, data, PLAIN, options.precision, device=device, mean_dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    fastest = VARIANTS[next(iter(variants.seconds))]
    best = plain
    if fastest != PLAIN:
        best = loop_for(work, data, fastest, options.precision, device=device)
    rounds, clock = rounds_of_a_turn(plain), clock_for(device, options.devices)
    runs: dict[int, Turns] = {}
    for length in sorted(lengths, reverse=True):
        if any(turns.engine == "sequential" for turns in runs.values()):
            runs[length] = next(iter(runs.values()))  # a shorter run is sequential as well
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "turns.json"
            timed = {"plain": plain, "best": best}
            watch = TakeTurns(timed, exact, rounds, path, clock, options.seconds)
            run = replace(options, length=length)
            ours.fit(work, data, run, 1 + options.rounds * rounds, watch)
            runs[length] = Turns(**json.loads(path.read_text()))
    return {"variants": asdict(variants), "runs": {n: asdict(turns) for n, turns in runs.items()}}


def main() -> None:
    """Print the result as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000], help="rounds of the runs")
    add_options(parser)
    arguments = parser.parse_args()
    options = Options.of_arguments(arguments)
    print(json.dumps(measure(arguments.workload, options, arguments.lengths)))


if __name__ == "__main__":
    main()
