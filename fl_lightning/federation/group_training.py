"""The clients' part of a round: a group trains, its updates are folded in, failures are told.

One client after the other in the module, or those that can many at once in slots, as `EngineChooser`
chose. What a client leaves behind in the module (weights, optimizer state, torchmetrics objects, the
fp16 scale) never reaches the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.corrections.added_term import AddedTerm
from fl_lightning.client.local_training import GlobalModel, LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.state.state_tensors import state_space
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.client.wrapped_optimizers import needs_closure
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, kept_apart, metrics_of
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import ClientUpdate, GroupUpdate
from fl_lightning.engines import CannotStack, ExampleGradients, receive_usable
from fl_lightning.federation.client_work import LocalWork, WorkPlan
from fl_lightning.federation.execution.engine import EngineChooser
from fl_lightning.federation.execution.slot_engine import SlotEngine
from fl_lightning.federation.execution.spot_check import SpotCheck
from fl_lightning.federation.execution.state_rehearsal import StateRehearsal
from fl_lightning.federation.execution.update_differences import Trained
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.intake import Intake
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_options import RoundOptions
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stages.client_masks import client_masks
from fl_lightning.federation.stages.client_scaler import ClientScaler
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.example_rounds import ExampleRounds, PrivateGradients
from fl_lightning.federation.stages.older_models import Start
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.federation.visits.batches import takes_index
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.shard_gradient import ShardGradient
from fl_lightning.server.server import Server
from fl_lightning.updates.broadcast import Broadcast
from fl_lightning.updates.transform import needs_shapes
from fl_lightning.updates.wire.traffic import bytes_down


class GroupTraining:
    """Trains groups of clients of one fit.

    Args:
        trainer: set up, with its optimizer built and its module on its device. If one of its
            callbacks has masks of the clients' own (`HasClientMasks`), clients train under these.
        options: what a round does.
        corrector: what clients add to their objective.
        intake: takes in their updates.
        memory: where clients keep what they have for themselves.

    Attributes:
        local: the sequential engine.
        collector: what clients log.
        scaler: the fp16 scale.
        engine: how clients are trained.
        step: one local step.
        personal: what clients have for themselves.
        broadcast: what clients get of the global model.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: RoundOptions,
        corrector: Corrector,
        intake: Intake,
        memory: ClientMemory,
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._module = trainer.lightning_module
        self._metrics = metrics_of(trainer.lightning_module)
        self._plan = WorkPlan(
            trainer.datamodule,  # type: ignore[attr-defined]
            LocalWork(
                options.local_steps,
                options.local_epochs,
                options.accumulate,
                options.seed,
                options.examples,
            ),
        )
        self.collector = LogCollector()
        self.step = LightningStep(trainer, self.collector, options.accumulate)
        self.local = LocalTrainer(
            self._module,
            trainer.optimizers,
            self.step,
            self.collector,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            by_hand=not self._module.automatic_optimization,
            ignore=NOT_THE_USERS,
        )
        if options.examples is not None:
            self.step.examples = self._private_gradients(options.examples)
        self.scaler = ClientScaler(getattr(trainer.precision_plugin, "scaler", None))
        self.personal = Personaliser(
            options.personal,
            memory,
            self._module,
            self.local,
            self.step,
            self._plan,
            self.scaler,
        )
        self._rehearsal = StateRehearsal(
            self._module, self.local, self.step, self._plan, self.scaler, options.client_state
        )
        self._client_masks = client_masks(trainer)
        self._versions = options.versions
        if self._versions is not None and self._client_masks is not None:
            raise ConfigurationError(
                "federation: asynchronous does not work with masks of the clients' own, which are "
                "found on the present model: use one mask for all"
            )
        self.engine = EngineChooser(
            trainer,
            self.local,
            self.step,
            options.engine,
            options.accumulate,
            options.correction,
            None if self.personal.kind is None else options.personal,
        )
        self._spot_check = SpotCheck(
            self.engine.spot_rate,
            self._module,
            self.collector,
            self._train_again,
            self.restore,
            trainer.precision,
        )
        self.broadcast = Broadcast(options.download, options.seed)
        if self._client_masks is not None and any(map(needs_shapes, options.updates)):
            raise ConfigurationError(
                "federation.updates: PowerSGD and blocks of a tensor do not work with masks of the "
                "clients' own, who each send other entries: use TopK or QSGD with a block of fixed "
                "size, or one mask for all"
            )
        if options.download and self._client_masks is not None:
            raise ConfigurationError(
                "federation: download does not work with masks of the clients' own, who each get "
                "other coordinates: leave it out, or use one mask for all"
            )
        self._corrector, self._intake = corrector, intake
        self._gradient = ShardGradient(self._module, self.local, self.step, self._plan)

    def _private_gradients(self, rounds: ExampleRounds) -> PrivateGradients:
        if needs_closure(optimizer := self._trainer.optimizers[0]):
            raise ConfigurationError(
                "federation.privacy ExampleDP pays for one gradient per step, and the step of "
                f"{type(optimizer).__name__} asks for a closure, to take several: use SGD or Adam"
            )
        collector = self.collector if rounds.privacy.log_unprotected else None
        gradients = ExampleGradients(
            self._module,
            self.step.loss,
            takes_index=takes_index(self._module.training_step),
            collector=collector,
        )
        return PrivateGradients(
            rounds, gradients, self.step.loss, lambda: self.local.space, collector
        )

    def renew_space(self) -> None:
        """Have vectors hold what may move now."""
        self.local.renew_space()
        self.engine.renew()

    def start_round(self) -> None:
        """Note what every client of the round starts from, besides the weights."""
        self.local.start_round(self._trainer.current_epoch)
        self.scaler.start_round()

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
                found = self._rehearsal.changed_by(self._work_of(group))
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
                self.engine.choose(model, self._work_of(group), lambda w: self._try_one(model, w))
        choice = ranks.gather(self.engine.state_dict())[0]
        if ranks.rank > 0:
            self.engine.load_state_dict(choice)

    def train(self, clients: Sequence[int], server: Server, record: RoundRecord) -> None:
        """Train clients from the server's model, fold in their updates and note what happened.

        Afterwards the module holds whatever the last of them left.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped.
        """
        work = self._who_will_send(self._work_of(clients), server, record)
        for start, together in self._by_start(work, server.model):
            alone = self._train_in_slots(together, start, server, record)
            with self.collector.listening_to(self._module):
                for client in alone:
                    with self.personal.hosted(client.client_id):
                        self._train_client(client, start, server, record)

    def _who_will_send(self, work: GroupWork, server: Server, record: RoundRecord) -> GroupWork:
        """Return what clients manage on their devices; those whose update will not come are out."""
        fleet, accumulate = self._options.fleet, self._options.accumulate
        if fleet is None or self._versions is not None:  # there, only what arrives is trained
            return work
        sending = []
        for client in work:
            num_steps = -(-len(client.sizes) // accumulate)
            fate = fleet.fate(client.client_id, num_steps, draw=client.round_index)
            record.durations[client.client_id] = fate.seconds
            if fate.is_lost and num_steps:
                record.lost.append(client.client_id)
                record.finish([client.client_id], num_bytes=self._bytes_down(server))
            else:
                sending.append(client.head(fate.num_steps * accumulate))
        return GroupWork.of(sending)

    def _by_start(self, work: GroupWork, present: GlobalModel) -> list[tuple[Start, GroupWork]]:
        """Return clients together that begin from the same model."""
        now = self._trainer.current_epoch
        if self._versions is None:
            sent = self.broadcast.send(present.params, present.buffers, now)
            is_present = sent.params is present.params
            model = present if is_present else GlobalModel(sent.params, present.buffers)
            return [(Start(model, present), work)]
        return [
            (self._versions.start(version, now, present), work.where(work.rounds == version))
            for version in sorted(set(work.rounds.tolist()))
        ]

    def restore(self, model: GlobalModel) -> None:
        """Put the global model, a fresh optimizer and the round's fp16 scale into their places."""
        self.local.restore(model)
        self.local.show_growth()
        self.scaler.wind_back()

    def _train_client(
        self, work: ClientWork, start: Start, server: Server, record: RoundRecord
    ) -> None:
        masks = self._masks_of(work.client_id, server.model)
        metrics = MetricStates(self._metrics)
        try:
            with self._calibrated(work):
                self.personal.train_own_part(start.model, work, masks)
                seed_global_generators(work.seed)
                self._set_terms(work, start.model)
                if self.step.examples is not None:
                    self.step.examples.begin(work.client_id, work.round_index)
                update = self._local_update(start.model, work, masks)
                growth = self.local.growth
                self.personal.train_beside(start.model, work, masks, update.delta)
            self._accept(update, work, start)  # of an update that is used, if nothing has failed
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            metrics.put_back()
            self.scaler.wind_back()
            if not isinstance(error, ClientFailure):
                raise
            self._skip_or_raise(error, record)
        else:
            self.scaler.end_client()
            self.personal.keep(work.client_id, self.personal.trained)
            self.local.keep_growth(growth)
            self._intake.receive(update, start, self._trainer.current_epoch, server, record)
        active = None if masks is None else self.local.space.coordinates(masks)
        record.finish([work.client_id], num_bytes=self._bytes_down(server, active))

    def _masks_of(self, client: int, model: GlobalModel) -> Mapping[str, Tensor] | None:
        if self._client_masks is None:
            return None
        self.local.restore(model)  # by which it may be found
        return self._client_masks(client)

    def _train_in_slots(
        self, work: GroupWork, start: Start, server: Server, record: RoundRecord
    ) -> GroupWork:
        """Train those clients that slots can train and return the others."""
        while (slots := self.engine.slots) is not None:
            try:
                return self._train_stacked(slots, work, start, server, record)
            except CannotStack as reason:  # nothing of the group has counted
                self.engine.fall_back(reason)
        return work

    def _train_stacked(
        self,
        slots: SlotEngine,
        work: GroupWork,
        start: Start,
        server: Server,
        record: RoundRecord,
    ) -> GroupWork:
        stackable, others = slots.split(work)
        remembers = self._corrector.correction.remembers
        by_id = {client.client_id: client for client in stackable} if remembers else {}
        check = self._spot_check.begin(stackable)
        again: list[int] = []

        def receive(usable: GroupUpdate, failures: list[ClientFailure]) -> None:
            # one after the other they may not fail: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if remembers:
                usable, refused = self._accept_group(usable, by_id, start)
                usable = usable.multiplied_out()  # which has been looked at: nobody learns twice
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                self._skip_or_raise(failure, record)
            now = self._trainer.current_epoch
            self._intake.receive_group(usable, start, now, server, record)
            for client_id in usable.client_ids if slots.kept else ():
                self.personal.keep(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)

        with self._intake.all_or_nothing(server, record):
            own = self.personal.recalled
            for group in slots.train(start.model, stackable, self._corrector.term, own):
                receive_usable(group, receive)
            check.compare(start.model, start.present)
        is_again = np.isin(stackable.client_ids, again)
        done = stackable.where(~is_again)
        record.finish(done.client_ids.tolist(), num_bytes=self._bytes_down(server))
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _skip_or_raise(self, failure: ClientFailure, record: RoundRecord) -> None:
        located = f"round {self._trainer.current_epoch}, {failure}"
        if self._options.on_client_failure == "raise":
            failure.args = (located,)
            raise failure
        record.skipped[failure.client_id] = located

    def _try_one(self, model: GlobalModel, work: ClientWork) -> ClientUpdate:
        """Train a client without consequences but for the module's metrics."""
        seed_global_generators(work.seed)
        with self._calibrated(work):
            return self._local_update(model, work)

    def _train_again(self, work: ClientWork, model: GlobalModel) -> Trained:
        """Train a client of slots as if one after the other did; only the module remembers it."""
        recalled = self.personal.recalled(work.client_id)
        own_start = self.local.own_start if recalled is None else recalled
        with self.personal.hosted(work.client_id), self._calibrated(work):
            seed_global_generators(work.seed)
            self._set_terms(work, model)
            update = self._local_update(model, work)
            return Trained(update, self.local.kept, own_start)

    def _local_update(
        self, model: GlobalModel, work: ClientWork, masks: Mapping[str, Tensor] | None = None
    ) -> ClientUpdate:
        try:
            with self.personal.sharing():
                return self.local.train(
                    model,
                    client_id=work.client_id,
                    num_examples=work.num_examples,
                    batches=self._plan.steps(work),
                    masks=masks,
                )
        finally:
            self.step.term = self.step.contrast = None

    @contextmanager
    def _calibrated(self, work: ClientWork) -> Iterator[None]:
        """Have the module's logits be those that this client trains with."""
        correction = self._options.correction
        labels = partial(self._plan.labels, work)
        logits = None if correction is None else correction.calibrated(self._module, labels)
        if logits is None:
            yield
            return
        has_trained = False
        try:
            yield
            has_trained = bool(work.sizes)
        finally:
            logits.close(has_trained=has_trained)

    def _set_terms(self, work: ClientWork, model: GlobalModel) -> None:
        """Have local steps add to gradients and losses what this client adds."""
        corrector, space, start = self._corrector, self.local.space, model.params
        self.step.contrast = corrector.contrast(work.client_id, start, space)
        term = corrector.term(work.client_id)
        if not term.is_nothing:
            self.step.term = AddedTerm(space, start, term)

    def _accept(self, update: ClientUpdate, work: ClientWork, start: Start) -> None:
        """Have the correction learn from an update that is used."""

        def gradient() -> Tensor:
            with self.collector.listening_to(self._module):
                return self._gradient(start.model, work)

        self._intake.learn(update, start, self.local.space, gradient)

    def _accept_group(
        self, group: GroupUpdate, work: Mapping[int, ClientWork], start: Start
    ) -> tuple[GroupUpdate, list[ClientFailure]]:
        """Have the correction learn, and return the group without those of whom it cannot."""
        rows, failures = [], []
        for row, update in enumerate(group):
            try:
                self._accept(update, work[update.client_id], start)
            except ClientFailure as failure:
                failures.append(failure)
            else:
                rows.append(row)
        return group.rows(rows) if failures else group, failures

    def _work_of(self, clients: Iterable[int]) -> GroupWork:
        now, chosen = self._trainer.current_epoch, list(clients)
        rounds = [now] * len(chosen)
        if self._versions is not None:
            began = self._versions.step(now).versions
            rounds = [began.get(client, now) for client in chosen]
        return self._plan.of(chosen, rounds)

    def _bytes_down(self, server: Server, active: Tensor | None = None) -> int:
        model = server.model
        if active is not None:
            return bytes_down(model.params, model.buffers, active)
        now = self._trainer.current_epoch
        sent = self.broadcast.send(model.params, model.buffers, now)
        return sent.num_bytes + self._corrector.bytes_down(model.params)
