"""A federation and the bare loop in turn: ``python -m benchmarks.turns W3``.

Both run in one process on one thread, so that whatever slows the machine down for a while slows
both. A turn is a round, or several one after the other where rounds are short: those of a run follow
one another too, and the first ones after something else find other things in the processor's caches. What
the federation does from the end of one round to the end of the next is its own, with Lightning's loops
and the server's step. All loops train every round from the federation's weights, so that differences do
not pile up, and the federation's aggregate is compared with that of a third, untimed loop, whose mean
is in double precision.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import ours
from benchmarks.bare import PLAIN, BareLoop, Visit, clock_for, own_plan, wait_for
from benchmarks.engineered import best_variant, loop_for
from benchmarks.options import Options, add_options
from benchmarks.plan import federation_plan
from benchmarks.workloads import WORKLOADS
from fl_lightning.data.shards import FlatShards

FULL = "32-true"
# A turn of the plain loop takes about so long, or has so many rounds.
_SECONDS_OF_A_TURN = 1.0
_MOST_ROUNDS_OF_A_TURN = 20


@dataclass
class Turns:
    """What was seen, round by round, without the first.

    Attributes:
        best: the fastest variant of the bare loop.
        best_full: the same of the loop in full precision, where the other loops are not.
        bare: seconds of the plain bare loop.
        bare_best: seconds of its fastest variant.
        bare_full: seconds of the fastest in full precision; none where the others are.
        ours: seconds of the federation.
        engine: how the federation trained its clients.
        difference: the largest difference between an entry of the federation's and of the bare
            loop's aggregate in any round, as a share of that aggregate's largest entry.
    """

    best: str
    best_full: str
    bare: list[float] = field(default_factory=list)
    bare_best: list[float] = field(default_factory=list)
    bare_full: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    engine: str = ""
    difference: float = 0.0


@dataclass(frozen=True)
class Round:
    """A round of the federation, for the others to train as well.

    Attributes:
        index: the round's.
        before: the global weights that it began from.
        after: those that it ended with.
        seconds: what it took.
    """

    index: int
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    seconds: float


class TakeTurns(Callback):
    """Has the bare loops train what the federation has, a turn each.

    Args:
        timed: loops, by the attribute of `Turns` that their seconds are.
        exact: compared with.
        rounds: of a turn; the first one, which warms up, has one.
        path: where the first process leaves what was seen; it may be a fork of this one.
        clock: of the federation.
        seconds: after which no further turn begins.
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
        full = timed.get("bare_full")
        self.turns = Turns(
            best=str(timed["bare_best"].variant), best_full=str(full.variant) if full else ""
        )
        self._turn: list[Round] = []
        self._before = [p.clone() for p in exact.start]
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = self._clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note a round; after the turn's last the others' begins, while other processes wait."""
        wait_for(pl_module.device.type)
        seconds = self._clock() - self._began
        after = [p.detach().clone() for p in pl_module.parameters()]
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
        """Leave what was seen."""
        if trainer.is_global_zero:
            self.turns.engine = ours.engine_of(trainer)
            self.path.write_text(json.dumps(asdict(self.turns)))

    def _train_bare(self, clients: FlatShards, *, is_warm: bool) -> None:
        loops = dict.fromkeys(self.timed.values())  # the plain one may be the best
        plans = [federation_plan(self.exact.work, clients, each.index) for each in self._turn]
        seconds = {loop: [*map(partial(_train, loop), self._turn, plans)] for loop in loops}
        for each, plan in zip(self._turn, plans, strict=True):
            _train(self.exact, each, plan)
            self._compare(each.before, each.after)
        if is_warm:
            self.turns.ours += [each.seconds for each in self._turn]
            for name, loop in self.timed.items():
                getattr(self.turns, name).extend(seconds[loop])

    def _compare(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        gaps = torch._foreach_norm(torch._foreach_sub(self.exact.start, after), torch.inf)
        moves = torch._foreach_norm(torch._foreach_sub(self.exact.start, before), torch.inf)
        share = torch.stack(gaps).max() / torch.stack(moves).max()
        so_far = torch.tensor(self.turns.difference)
        self.turns.difference = float(torch.maximum(share, so_far))  # a NaN stays and shows


def _train(loop: BareLoop, each: Round, plan: Sequence[Visit]) -> float:
    """Train a round of the federation and return its seconds."""
    torch._foreach_copy_(loop.start, each.before)
    return loop.train_round(plan)


def rounds_of_a_turn(loop: BareLoop) -> int:
    """Return how many rounds of a loop are a turn."""
    seconds = min(loop.train_round(own_plan(loop.work, number)) for number in range(2))
    return min(max(1, round(_SECONDS_OF_A_TURN / seconds)), _MOST_ROUNDS_OF_A_TURN)


def measure(name: str, options: Options) -> Turns:
    """Return what the rounds of one workload took."""
    torch.set_num_threads(1)
    work = options.workload(name)
    data = work.data()
    device = options.device
    plain = BareLoop(work, data, PLAIN, options.precision, device=device)
    timed = {"bare": plain, "bare_best": plain}
    precisions = {"bare_best": options.precision}
    if options.precision != FULL:
        precisions["bare_full"] = FULL
    for column, precision in precisions.items():
        variant = best_variant(work, data, precision, device, options.seconds / 3)
        if (variant, precision) != (PLAIN, options.precision):
            timed[column] = loop_for(work, data, variant, precision, device=device)
    exact = BareLoop(work, data, PLAIN, options.precision, device=device, mean_dtype=torch.float64)
    rounds = rounds_of_a_turn(plain)
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder) / "turns.json", clock_for(device, options.devices)
        turns = TakeTurns(timed, exact, rounds, path, clock, options.seconds)
        ours.fit(work, data, options, 1 + options.rounds * rounds, turns)
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
