"""The clients' side of a round in a fit: clients train, and their updates are yielded.

Clients train one after the other in the module, or many at once in slots, as `EngineChooser` chose.
Nothing here knows the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.metrics import kept_apart, metrics_of
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.engines import usable_rows
from fl_lightning.federation.clients.choice import EngineChooser
from fl_lightning.federation.clients.in_slots import SlotEngine
from fl_lightning.federation.clients.one_by_one import OneByOne, without_buffers
from fl_lightning.federation.clients.spot_check import SpotCheck, TrainedClient
from fl_lightning.federation.clients.state_rehearsal import StateRehearsal
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import LocalTraining, Missing, Stages, Start, Upload
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.updates.message import bytes_up


class FitClients:
    """The clients' side of a fit: trains clients sequentially or in slots, and yields their updates.

    Attributes:
        local: the sequential engine.
        plan: draws the work of clients in a round.
        collector: collects the values that clients log.
        engine: chooses how clients train.
        rehearsal: finds the tensors besides weights that clients change.
        step: runs one local step.
        stages_ahead: stages that process each update after `train` yields it.
        metrics_kept_apart: makes a context in which the module's torchmetrics objects exchange nothing
            between processes.
        lose: called with the failure of a client whose update is lost after `train`, in a sum over sites.
    """

    lose: Callable[[ClientFailure], None]
    metrics_kept_apart: Callable[[], AbstractContextManager[None]]

    def __init__(self, run: Run, options: Options, stages: Stages) -> None:
        self._run, self._options, self._stages = run, options, stages
        self.stages_ahead = stages
        self._module, self.plan = run.module, run.plan
        self.local, self.collector, self.step = run.local, run.collector, run.step
        shared = metrics_of(run.module) if run.ranks.size > 1 else []
        self.metrics_kept_apart = partial(kept_apart, shared) if shared else nullcontext
        self.rehearsal = StateRehearsal(run, options.client_state)
        self.engine = EngineChooser(run, options, stages)
        self._one_by_one = OneByOne(run, stages, run.step.counts)
        self._spot_check = SpotCheck(
            options.spot_check,
            run.module,
            run.collector,
            self._train_alone,
            self.restore,
            run.trainer.precision,
        )

    def renew_space(self) -> None:
        """Rebuild the layout of the exchanged vectors, and the slot engine if there is one, for the current masks."""
        self.local.renew_space()
        self.engine.renew()

    def add_named_state(self) -> bool:
        """Add the tensors of ``federation.client_state`` to those that a resumed run exchanges; return if any is new."""
        names = self.local.state_names
        more = [] if names is None else self.rehearsal.together([names])
        if names is None or more == names:
            return False
        self.local.set_state(more)
        return True

    def find_state(self, cohort: Iterable[int], ranks: Ranks) -> bool:
        """Find which buffers and frozen parameters clients change, over all processes.

        Returns:
            Whether these tensors are known now.
        """
        names = self.rehearsal.known
        if self.rehearsal.is_needed:
            with self.collector.listening_to(self._module), self.metrics_kept_apart():
                found = self.rehearsal.changed_by(self.plan.of([*cohort], self._run.round_index))
            answers = [answer for answer in ranks.gather(found) if answer is not None]
            if not answers:
                return False
            names = self.rehearsal.together(answers)
        self.local.set_state(names)
        return True

    def choose_engine(self, model: GlobalModel, cohort: Iterable[int], ranks: Ranks) -> None:
        """Choose how clients train, sequentially or in slots, before the first trains; same choice in all processes."""
        if ranks.rank == 0:
            with self.collector.listening_to(self._module):
                work = self.plan.of([*cohort], self._run.round_index)
                self.engine.choose(model, work, partial(self._train_alone, is_corrected=False))
            self.local.restore(model)  # a trial that failed may leave stacked tensors in the module
        choice = ranks.gather(self.engine.state_dict())[0]
        if ranks.rank > 0:
            self.engine.load_state_dict(choice)

    def restore(self, model: GlobalModel) -> None:
        """Restore the global model, a fresh optimizer and the round's fp16 scale."""
        self.local.restore(model)
        self.local.show_lists()

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients that start from the same model and options, and yield their updates or failures.

        Afterwards the module holds the last client's model.

        Raises:
            CannotStack: if slots cannot run a step: the round is to begin anew, with another engine.
        """
        if self.engine.slots is None and start.options is None:
            return self._one_by_one.train(start, work)
        return self._train_as_of(start, work)

    def _train_as_of(
        self, start: Start, work: GroupWork
    ) -> Generator[Upload | Missing, None, None]:
        """Train clients with the optimizer options of the round in which they started, in slots or else sequentially."""
        with self.local.round_start.as_of(start.options):
            if self.engine.slots is not None:
                work = yield from self._train_stacked(self.engine.slots, start, work)
            yield from self._one_by_one.train(start, work)

    def _train_stacked(
        self, slots: SlotEngine, start: Start, work: GroupWork
    ) -> Generator[Upload | Missing, None, GroupWork]:
        """Train clients in slots, yield their updates, and return the work of those that must train sequentially.

        Raises:
            CannotStack: if slots cannot run a step.
        """
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check, personal = self._spot_check, stages.first(Personaliser)
        correction = stages.first(Corrector)
        term = None if correction is None else correction.term
        own = None if personal is None else personal.tensors_of
        check.begin(stackable)
        again: list[int] = []
        for trained in slots.train(start.model, stackable, term, own):
            usable, failures = usable_rows(trained, self.local.check_loss)
            # they train again sequentially: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                yield Missing(start, failure)
            sent = without_buffers(usable) if stages.is_private else usable
            yield Upload(start, sent, sent, bytes_up(sent))
            if personal is not None and slots.kept:
                for client_id in usable.client_ids:
                    personal.store(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)
        check.compare(start.model, start.present)
        is_again = np.isin(stackable.client_ids, again)
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _learnt(
        self, updates: Updates, work: dict[int, ClientWork], start: Start
    ) -> tuple[Updates, list[ClientFailure]]:
        """Store clients' new states; return the updates of clients that succeeded, and the failures of the others."""
        rows, failures = [], []
        for row, update in enumerate(updates):
            try:
                learnt = self._stages.learn(update, work[update.client_id], start)
            except ClientFailure as failure:
                failures.append(failure)
            else:
                learnt()
                rows.append(row)
        return updates.rows(rows) if failures else updates, failures

    def _train_alone(
        self, work: ClientWork, model: GlobalModel, *, is_corrected: bool = True
    ) -> TrainedClient:
        """Train a client sequentially for a trial or check; change nothing but the module and its metrics."""
        personal = self._stages.first(Personaliser)
        own = None if personal is None else personal.tensors_of(work.client_id)
        own_start = self.local.personal_start if own is None else own
        training = LocalTraining(work, Start(model, model), counts=False, is_corrected=is_corrected)
        update = self._one_by_one.train_alone(training)
        return TrainedClient(update, self.local.personal_end, own_start)
