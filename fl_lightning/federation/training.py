"""The clients' side of a round: clients train, and what they send is handed to who takes it.

One client after the other in the module, or those that can many at once in slots, as `EngineChooser`
chose. What a client leaves behind in the module (weights, optimizer state, torchmetrics objects, the
fp16 scale) never reaches the next one. Nothing here knows the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

from fl_lightning.client.state.tensors import state_space
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, kept_apart, metrics_of
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.engines import CannotStack, receive_usable
from fl_lightning.federation.execution.engine import EngineChooser
from fl_lightning.federation.execution.slot_engine import SlotEngine
from fl_lightning.federation.execution.spot_check import SpotCheck
from fl_lightning.federation.execution.state_rehearsal import StateRehearsal
from fl_lightning.federation.execution.update_differences import Trained
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Sent, Stages, Start, Turn


class Taker(Protocol):
    """Who takes what clients send."""

    def receive(self, updates: Updates, start: Start) -> None:
        """Take updates of clients that began alike."""

    def take(self, sent: Sent) -> None:
        """Take updates that have gone their way."""

    def skip(self, failure: ClientFailure) -> None:
        """Know why a client's update cannot be used.

        Raises:
            ClientFailure: if that is to end the round.
        """

    def finish(self, clients: Sequence[int], num_bytes: int) -> None:
        """Know that clients are done, and how many bytes each was sent."""

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """Have what is taken inside the block count as a whole, or not at all if it fails."""


class Training:
    """Trains groups of clients of one fit.

    Args:
        run: in whose module.
        stages: what else happens while they do.

    Attributes:
        local: the sequential engine.
        collector: what clients log.
        engine: how clients are trained.
        step: one local step.
    """

    def __init__(self, run: Run, stages: Stages) -> None:
        self._run, self._stages = run, stages
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
        for stage in self._stages:
            stage.start_round()

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
        """Return what clients have to do in this round."""
        chosen = list(clients)
        return self._plan.of(chosen, self._stages.versions(chosen, self._run.round_index))

    def restore(self, model: GlobalModel) -> None:
        """Put the global model, a fresh optimizer and the round's fp16 scale into their places."""
        self.local.restore(model)
        self.local.show_growth()
        self._scaler.wind_back()

    def train(self, start: Start, work: GroupWork, taker: Taker) -> None:
        """Train clients that begin alike.

        Afterwards the module holds whatever the last of them left.

        Args:
            start: what they begin from.
            work: theirs.
            taker: of what they send.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped.
        """
        with self.local.round_start.as_of(start.options):
            alone = self._train_in_slots(start, work, taker)
            with self.collector.listening_to(self._module):
                for client in alone:
                    self._train_client(client, start, taker)

    def _train_client(self, work: ClientWork, start: Start, taker: Taker) -> None:
        turn = Turn(work, start, num_bytes=start.num_bytes)
        metrics = MetricStates(self._metrics)
        try:
            with self._around(turn):
                self._stages.begin(turn)
                update = self._take_steps(turn)
                growth = self.local.growth
                self._stages.end(turn, update)
                self._stages.learn(update, work, start)
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            metrics.put_back()
            if not isinstance(error, ClientFailure):
                raise
            taker.skip(error)
        else:
            self.local.keep_growth(growth)
            taker.receive(Updates.of(update), start)
        taker.finish([work.client_id], turn.num_bytes)

    @contextmanager
    def _around(self, turn: Turn) -> Iterator[None]:
        """One client's module inside this block, and a Trainer that counts its steps."""
        with self.step.counts.of_client(turn.work), self._stages.around(turn):
            yield

    def _take_steps(self, turn: Turn) -> ClientUpdate:
        """Take the steps that a client shares."""
        work = turn.work
        seed_global_generators(work.seed)
        with self._stages.steps(turn):
            return self.local.train(
                turn.start.model,
                client_id=work.client_id,
                num_examples=work.num_examples,
                batches=self._plan.steps(work),
                masks=turn.masks,
            )

    def _train_in_slots(self, start: Start, work: GroupWork, taker: Taker) -> GroupWork:
        """Train those clients that slots can train and return the others."""
        while (slots := self.engine.slots) is not None:
            try:
                return self._train_stacked(slots, start, work, taker)
            except CannotStack as reason:  # nothing of the group has counted
                self.engine.fall_back(reason)
        return work

    def _train_stacked(
        self, slots: SlotEngine, start: Start, work: GroupWork, taker: Taker
    ) -> GroupWork:
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check = self._spot_check.begin(stackable)
        again: list[int] = []

        def receive(usable: Updates, failures: list[ClientFailure]) -> None:
            # one after the other they may not fail: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
                usable = usable.multiplied_out()  # which has been looked at: nobody learns twice
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                taker.skip(failure)
            taker.receive(usable, start)
            for client_id in usable.client_ids if slots.kept else ():
                stages.keep(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)

        with taker.all_or_nothing():
            for group in slots.train(start.model, stackable, stages.term, stages.own):
                receive_usable(group, receive)
            check.compare(start.model, start.present)
        is_again = np.isin(stackable.client_ids, again)
        taker.finish(stackable.where(~is_again).client_ids.tolist(), start.num_bytes)
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
        with self._around(turn):
            return self._take_steps(turn)

    def _train_again(self, work: ClientWork, model: GlobalModel) -> Trained:
        """Train a client of slots as if one after the other did; only the module remembers it."""
        own = self._stages.own(work.client_id)
        own_start = self.local.own_start if own is None else own
        turn = Turn(work, Start(model, model), counts=False)
        with self._around(turn):
            update = self._take_steps(turn)
            return Trained(update, self.local.kept, own_start)
