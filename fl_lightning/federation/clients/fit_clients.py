"""The clients' side of a round in a fit: clients train, and what they send is yielded.

One client after the other in the module, or those that can many at once in slots, as `EngineChooser`
chose. What a client leaves behind in the module (weights, optimizer state, torchmetrics objects, the
fp16 scale) never reaches the next one. Nothing here knows the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from fl_lightning.client.state.state_tensors import state_space
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, kept_apart, metrics_of
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.engines import CannotStack, usable_rows
from fl_lightning.federation.execution.engine import EngineChooser
from fl_lightning.federation.execution.slot_engine import SlotEngine
from fl_lightning.federation.execution.spot_check import SpotCheck
from fl_lightning.federation.execution.state_rehearsal import StateRehearsal
from fl_lightning.federation.execution.update_differences import Trained
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Missing, Stages, Start, Turn, Upload
from fl_lightning.federation.transaction import Transaction


class FitClients:
    """Trains groups of clients of one fit.

    Args:
        run: in whose module.
        stages: what else happens while they do.

    Attributes:
        local: the sequential engine.
        collector: what clients log.
        engine: how clients are trained.
        step: one local step.
        stages_ahead: that updates have to pass once `train` has yielded them.
        lose: told of a client whose update is lost later than that, in a sum over sites.
    """

    lose: Callable[[ClientFailure], None]

    def __init__(self, run: Run, stages: Stages) -> None:
        self._run, self._stages = run, stages
        self.stages_ahead = stages
        self._module, self._plan, self._scaler = run.module, run.plan, run.scaler
        self.local, self.collector, self.step = run.local, run.collector, run.step
        self._metrics = metrics_of(run.module)
        self._rehearsal = StateRehearsal(run)
        self.engine = EngineChooser(run, stages)
        self._spot_check = SpotCheck(
            self.engine.spot_rate,
            run.module,
            run.collector,
            self._train_again,
            self.restore,
            run.trainer.precision,
        )

    def renew_space(self) -> None:
        """Have vectors hold what may move now."""
        self.local.renew_space()
        self.engine.renew()

    def start_round(self) -> None:
        """Note what every client of the round starts from, besides the weights."""
        self.local.start_round(self._run.round_index)
        self._scaler.start_round()

    @property
    def num_known_state(self) -> int:
        """Numbers in buffers that travel, as far as that is known without training."""
        return state_space(self._module, self._rehearsal.known).size

    def add_named_state(self, *, inside: bool) -> bool:
        """Add what ``federation.client_state`` names now to what a resumed run found out.

        Args:
            inside: whether the run goes on inside a round, in which that cannot change.

        Returns:
            Whether there is more.

        Raises:
            ConfigurationError: if there is, inside a round.
        """
        names = self.local.state_names
        more = [] if names is None else self._rehearsal.together([names])
        if names is None or more == names:
            return False
        if inside:
            added = next(name for name in more if name not in names)
            raise ConfigurationError(
                f"federation.client_state names {added}, which the checkpoint's run did not average, "
                "and the checkpoint was written inside a round: resume from one between two rounds"
            )
        self.local.settle_state(more)
        return True

    def settle_state(self, group: Iterable[int], ranks: Ranks) -> bool:
        """Find out what else than weights clients change; several processes take one answer.

        Returns:
            Whether that has become known now.
        """
        if self.local.state_names is not None:
            return False
        names = self._rehearsal.known
        if self._rehearsal.is_needed:
            with self.collector.listening_to(self._module), self.metrics_kept_apart():
                found = self._rehearsal.changed_by(self.work_of(group))
            answers = [answer for answer in ranks.gather(found) if answer is not None]
            if not answers:
                return False
            names = self._rehearsal.together(answers)
        self.local.settle_state(names)
        return True

    def metrics_kept_apart(self) -> AbstractContextManager[None]:
        """Keep the module's torchmetrics objects from exchanging anything between processes."""
        return kept_apart(self._metrics)

    def settle_engine(self, model: GlobalModel, group: Iterable[int], ranks: Ranks) -> None:
        """Choose the engine before the first clients train; several processes take one and all."""
        if self.engine.is_settled:
            return
        if ranks.rank == 0:
            with self.collector.listening_to(self._module):
                self.engine.choose(model, self.work_of(group), lambda w: self._try_one(model, w))
        choice = ranks.gather(self.engine.state_dict())[0]
        if ranks.rank > 0:
            self.engine.load_state_dict(choice)

    def work_of(self, clients: Iterable[int]) -> GroupWork:
        """Local work of some clients in the present round."""
        chosen = list(clients)
        return self._plan.of(chosen, [self._run.round_index] * len(chosen))

    def restore(self, model: GlobalModel) -> None:
        """Put the global model, a fresh optimizer and the round's fp16 scale into their places."""
        self.local.restore(model)
        self.local.show_growth()
        self._scaler.wind_back()

    def train(
        self, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, None]:
        """Train clients that begin alike, and yield what they send.

        Afterwards the module holds whatever the last of them left.

        Args:
            start: what they begin from.
            work: theirs.
            transaction: of what has been yielded: those in slots count as a whole.
        """
        with self.local.as_of(start.options):
            while (slots := self.engine.slots) is not None:
                try:
                    work = yield from self._train_in_slots(slots, start, work, transaction)
                    break
                except CannotStack as reason:
                    transaction.roll_back()
                    self.engine.fall_back(reason)
            with self.collector.listening_to(self._module):
                for client in work:
                    yield self._train_client(client, start)

    def _train_client(self, work: ClientWork, start: Start) -> Upload | Missing:
        turn = Turn(work, start, num_bytes=start.num_bytes)
        metrics = MetricStates(self._metrics)
        try:
            with self._stages.around(turn):
                update = self._take_steps(turn)
                if self._stages.learns:
                    self._stages.learn(update, work, start)
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            metrics.put_back()
            if not isinstance(error, ClientFailure):
                raise
            return Missing(start._replace(num_bytes=turn.num_bytes), error)
        self.local.keep_growth(self._growth)
        return self._upload(Updates.of(update), start._replace(num_bytes=turn.num_bytes))

    def _upload(self, updates: Updates, start: Start) -> Upload:
        if self._stages.is_private:
            updates = replace(updates, buffers=updates.buffers[:, :0])
        return Upload.of(updates, start)

    def _take_steps(self, turn: Turn) -> ClientUpdate:
        """Take the steps that a client shares."""
        work = turn.work
        with self._stages.steps(turn):
            seed_global_generators(work.seed)
            turn.update = update = self.local.train(
                turn.start.model,
                client_id=work.client_id,
                num_examples=work.num_examples,
                batches=self._plan.steps(work),
                masks=turn.masks,
            )
            self._growth = self.local.growth
        return update

    def _train_in_slots(
        self, slots: SlotEngine, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, GroupWork]:
        """Train those clients that slots can train, and return the others.

        Raises:
            CannotStack: if slots meet what they cannot run.
        """
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check = self._spot_check.begin(stackable)
        again: list[int] = []
        transaction.begin()
        for group in slots.train(start.model, stackable, stages.term, stages.own):
            usable, failures = usable_rows(group)
            # one after the other they may not fail: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                yield Missing(start, failure)
            yield self._upload(usable, start)
            for client_id in usable.client_ids if slots.kept else ():
                stages.keep(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)
        check.compare(start.model, start.present)
        transaction.commit()
        is_again = np.isin(stackable.client_ids, again)
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _learnt(
        self, updates: Updates, work: dict[int, ClientWork], start: Start
    ) -> tuple[Updates, list[ClientFailure]]:
        """Have clients learn, and return the updates without those of whom it cannot be."""
        rows, failures = [], []
        for row, update in enumerate(updates):
            try:
                self._stages.learn(update, work[update.client_id], start)
            except ClientFailure as failure:
                failures.append(failure)
            else:
                rows.append(row)
        return updates.rows(rows) if failures else updates, failures

    def _try_one(self, model: GlobalModel, work: ClientWork) -> ClientUpdate:
        """Train a client without consequences but for the module's metrics."""
        turn = Turn(work, Start(model, model), counts=False, is_corrected=False)
        with self._stages.around(turn):
            return self._take_steps(turn)

    def _train_again(self, work: ClientWork, model: GlobalModel) -> Trained:
        """Train a client of slots as if one after the other did; only the module remembers it."""
        own = self._stages.own(work.client_id)
        own_start = self.local.own_start if own is None else own
        turn = Turn(work, Start(model, model), counts=False)
        with self._stages.around(turn):
            update = self._take_steps(turn)
            return Trained(update, self.local.kept, own_start)
