"""The clients' side of a round in a fit: clients train, and what they send is yielded.

One client after the other in the module, or those that can many at once in slots, as `EngineChooser`
chose. Nothing here knows the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.metrics import kept_apart, metrics_of
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.engines import CannotStack
from fl_lightning.federation.clients.choice import EngineChooser
from fl_lightning.federation.clients.in_slots import InSlots
from fl_lightning.federation.clients.one_by_one import OneByOne
from fl_lightning.federation.clients.spot_check import SpotCheck, Trained
from fl_lightning.federation.clients.state_rehearsal import StateRehearsal
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round import Transaction
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Missing, Stages, Start, Turn, Upload


class FitClients:
    """Trains groups of clients of one fit.

    Args:
        run: in whose module.
        options: what was asked for.
        stages: what else happens while they do.

    Attributes:
        local: the sequential engine.
        collector: what clients log.
        engine: how clients are trained.
        rehearsal: finds out what else than weights they change.
        step: one local step.
        stages_ahead: that updates have to pass once `train` has yielded them.
        metrics_kept_apart: makes a block in which the module's torchmetrics objects exchange nothing between
            processes.
        lose: told of a client whose update is lost later than that, in a sum over sites.
    """

    lose: Callable[[ClientFailure], None]
    metrics_kept_apart: Callable[[], AbstractContextManager[None]]

    def __init__(self, run: Run, options: Options, stages: Stages) -> None:
        self._run, self._options, self._stages = run, options, stages
        self.stages_ahead = stages
        self._module, self._plan, self._scale = run.module, run.plan, run.scale
        self.local, self.collector, self.step = run.local, run.collector, run.step
        shared = metrics_of(run.module) if run.ranks.size > 1 else []
        self.metrics_kept_apart = partial(kept_apart, shared) if shared else nullcontext
        self.rehearsal = StateRehearsal(run, options.client_state)
        self.engine = EngineChooser(run, options, stages)
        self._one_by_one = OneByOne(
            run.module, run.local, run.plan, run.collector, stages, run.step.counts
        )
        spot_check = SpotCheck(
            options.spot_check,
            run.module,
            run.collector,
            self._train_again,
            self.restore,
            run.trainer.precision,
        )
        self._in_slots = InSlots(stages, spot_check)

    def renew_space(self) -> None:
        """Rebuild the space of the vectors: what may move now."""
        self.local.renew_space()
        self.engine.renew()

    def add_named_state(self) -> bool:
        """Add what ``federation.client_state`` names now to what a resumed run found out; return if it is more."""
        names = self.local.state_names
        more = [] if names is None else self.rehearsal.together([names])
        if names is None or more == names:
            return False
        self.local.settle_state(more)
        return True

    def settle_state(self, group: Iterable[int], ranks: Ranks) -> bool:
        """Find which tensors besides weights clients change; all processes use the same list.

        Returns:
            Whether that has become known now.
        """
        names = self.rehearsal.known
        if self.rehearsal.is_needed:
            with self.collector.listening_to(self._module), self.metrics_kept_apart():
                found = self.rehearsal.changed_by(self.work_of(group))
            answers = [answer for answer in ranks.gather(found) if answer is not None]
            if not answers:
                return False
            names = self.rehearsal.together(answers)
        self.local.settle_state(names)
        return True

    def warn_of_rehearsal(self, record: RoundRecord) -> None:
        """Warn of clients that have trained, and whose rehearsed steps had failed."""
        if self.rehearsal.failures:
            ended = {*record.finished}.difference(record.skipped, record.lost)
            self.rehearsal.warn_of_failures(ended)

    def settle_engine(self, model: GlobalModel, group: Iterable[int], ranks: Ranks) -> None:
        """Choose the engine before the first clients train; several processes take one and all."""
        if ranks.rank == 0:
            with self.collector.listening_to(self._module):
                self.engine.choose(model, self.work_of(group), self._try_one)
        choice = ranks.gather(self.engine.state_dict())[0]
        if ranks.rank > 0:
            self.engine.load_state_dict(choice)

    def work_of(self, clients: Iterable[int]) -> GroupWork:
        """Local work of some clients in the present round."""
        chosen = list(clients)
        return self._plan.of(chosen, [self._run.trainer.current_epoch] * len(chosen))

    def restore(self, model: GlobalModel) -> None:
        """Put the global model, a fresh optimizer and the round's fp16 scale into their places."""
        self.local.restore(model)
        self.local.show_lists()
        if self._scale.is_at_work:
            self._scale.wind_back()

    def train(
        self, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, None]:
        """Train clients that begin alike, and yield what they send.

        Afterwards the module holds whatever the last of them left. Those in slots count as a whole.
        """
        if self.engine.slots is None and start.options is None:
            return self._one_by_one.train(start, work)
        return self._train_as_of(start, work, transaction)

    def _train_as_of(
        self, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, None]:
        """Train with the optimizers' options of the start, as many as possible in slots."""
        with self.local.round_start.as_of(start.options):
            while (slots := self.engine.slots) is not None:
                try:
                    work = yield from self._in_slots.train(slots, start, work, transaction)
                    break
                except CannotStack as reason:
                    self.engine.fall_back(reason)
            yield from self._one_by_one.train(start, work)

    def _try_one(self, model: GlobalModel, work: ClientWork) -> ClientUpdate:
        """Train a client without consequences but for the module's metrics."""
        turn = Turn(work, Start(model, model), counts=False, is_corrected=False)
        return self._one_by_one.train_alone(turn)

    def _train_again(self, work: ClientWork, model: GlobalModel) -> Trained:
        """Train a client of slots as if one after the other did; only the module remembers it."""
        own = self._stages.own(work.client_id)
        own_start = self.local.own_start if own is None else own
        turn = Turn(work, Start(model, model), counts=False)
        update = self._one_by_one.train_alone(turn)
        return Trained(update, self.local.kept, own_start)
