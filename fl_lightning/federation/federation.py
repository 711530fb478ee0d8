"""The ``federation:`` block: a callback that turns a Lightning run into a federated one.

With it among the Trainer's callbacks an epoch is a round: `RoundGroups` gives the clients of each
round, `FederatedLoop` trains them, `Round` holds the server, and this class keeps
Lightning's calendar: set up, log, save, restore, clean up.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.devices import Devices
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.freed_memory import keep_freed_memory
from fl_lightning.core.seeds import (
    check_seed,
    derive_seed,
    preserve_global_generators,
    run_seed,
    seed_global_generators,
)
from fl_lightning.data.cohorts.cohort import AllClients, CohortSampler, UniformCohort, as_cohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.engines import Speedup
from fl_lightning.federation.aggregation import run_aggregator
from fl_lightning.federation.checkpoints.atomic_checkpoint import AtomicCheckpointIO
from fl_lightning.federation.checkpoints.run_state import load_run_state, run_state
from fl_lightning.federation.checks.by_hand import check_by_hand, check_several
from fl_lightning.federation.checks.compatibility import (
    check_asynchronous,
    check_compatible,
    check_set_up,
    check_validation_interval,
)
from fl_lightning.federation.checks.first_look import check_data_fits
from fl_lightning.federation.checks.options import (
    check_cohort_size,
    check_correction,
    check_shards,
    check_trusted,
    check_values,
)
from fl_lightning.federation.checks.privacy import check_monitors
from fl_lightning.federation.checks.zero_rate import zero_rate_line
from fl_lightning.federation.client_work import LocalWork
from fl_lightning.federation.execution.engine_options import (
    EngineName,
    EngineOptions,
    trains_in_large_groups,
)
from fl_lightning.federation.execution.group_size import num_short_clients
from fl_lightning.federation.groups import RoundGroups, Share
from fl_lightning.federation.hooks import GroupsPassBy
from fl_lightning.federation.loop import begin_next_round, install, renumber_groups
from fl_lightning.federation.processes.shares import local_work
from fl_lightning.federation.round import Round
from fl_lightning.federation.round_hooks import have_rounds_for_batches
from fl_lightning.federation.round_log import log_round
from fl_lightning.federation.run import Run, RunOptions
from fl_lightning.federation.stage import Stage
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.federation.stages.clock import VirtualTime
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.order import stages_of
from fl_lightning.federation.stages.personal_models import PersonalModels
from fl_lightning.federation.stages.personal_recall import recalled_models, state_to_bring_home
from fl_lightning.federation.stages.privacy_run import (
    announce_privacy,
    check_privacy,
    check_trainer,
    count_on,
    privacy_at_work,
    protects_clients,
)
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.federation.stages.secure_rounds import check_secure
from fl_lightning.federation.visits.fresh_losses import Having, refresh_losses
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.privacy.protected import (
    FEWEST_CLIENTS,
    Protected,
    Terms,
)
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.collect import RobustRule
from fl_lightning.server.server import (
    Server,
    ServerOptimizer,
    ServerSchedule,
    as_aggregator,
    fedavg_optimizer,
)
from fl_lightning.server.staleness import AsyncRule
from fl_lightning.updates.broadcast import Broadcast
from fl_lightning.updates.error_feedback import ErrorFeedback
from fl_lightning.updates.path import UpdatePath
from fl_lightning.updates.transform import UpdateTransform


@final
class Federation(Callback):
    """Trains over many clients: one epoch is one round.

    The module's optimizer is the clients' (its state starts empty whenever a client trains), its
    learning-rate schedule advances once per round, ``global_step`` counts rounds. What a client sends
    is where it began minus where it ended, however it got there: a ``training_step`` may also set the
    parameters itself and return None, or step one or several optimizers by hand
    (``automatic_optimization = False``), in which case clients train one after the other.

    Args:
        cohort: who takes part in a round; everybody if None.
        local_steps: optimizer steps of a client per round; or
        local_epochs: passes over its shard per round. One pass if neither is given.
        correction: what clients add to their gradients so that they do not drift apart: `FedProx`,
            `Scaffold`, `FedDyn`, …; nothing if None.
        personal: what clients have for themselves: layers (`Personal`: FedPer, FedBN, FedRep), a
            model beside the shared one (`Ditto`), or the global model fine-tuned before it is
            evaluated (`FineTuned`); nothing if None.
        updates: what happens to a client's update on its way, in order: `TopK`, `QSGD`, …, and
            `ErrorFeedback` around them; nothing if None.
        download: what happens to the global model on its way down: quantisers; nothing if None.
        aggregator: how updates become one; the mean weighted by examples if None, over the clients
            that may move a coordinate where they have masks of their own. Or a robust rule, like
            `Krum`, that looks at all updates of the round together.
        privacy: differential privacy of clients, `CentralDP`, `LocalDP`, …, or of their single
            examples, `ExampleDP`; none if None.
        server_optimizer: builds the `torch.optim.Optimizer` that descends the aggregated delta;
            SGD with learning rate 1, which is FedAvg, if None.
        devices: how fast clients are, how reliable, and how long the server waits for them, in
            virtual time; if None there is no such time, and all arrive.
        asynchronous: instead of waiting for a cohort the server steps whenever so many updates are
            there (`FedBuff`, `FedAsync`), in the virtual time of ``devices``. A round is a step of
            the server.
        server_schedule: builds the schedule of that optimizer's learning rate over rounds, e.g. of
            `torch.optim.lr_scheduler`; None for a constant one.
        attackers: clients that attack, to test defences; nobody if None.
        stages: what else happens in a round, of your own: see `fl_lightning.federation.stage.Stage`.
        on_client_failure: what to do when a client's step raises, its loss or update is not
            finite, or it has no examples: ``raise``, naming it, or ``skip`` it and count it.
        min_replies: a round with fewer valid updates stops the run.
        engine: ``sequential`` trains clients one after the other, ``slots`` many at once, which is
            faster for small models; ``auto`` measures and says in one line what it chose.
        slots: how many clients at once; chosen by the model's size if None.
        speedups: of the steps of clients that train one after the other, any of
            ``direct_layers``, ``channels_last``, ``fused_optimizer``, ``thin_gradients``,
            ``math_attention`` and ``compiled``, see `fl_lightning.engines.compiler.speedups`; updates are the same but for rounding. If None,
            ``engine: auto`` measures which pay, if the run is long, and other engines use none.
        spot_check: fraction of the clients in slots that are trained one after the other as well, to
            see that both ways give the same: drawn by seed, in any round, without a trace in the
            result. A difference beyond rounding stops the run before the server steps. If None, one
            in 200, or fewer where that would take more than 1 % of the time; 0 is none, 1 all.
            Where clients train one after the other there is nothing to check.
        clients_per_group: how many clients Lightning's loop takes for a batch: so often the
            progress bar moves and a checkpoint inside a round can be saved. Results do not depend on
            it: for other callbacks a round is one batch, unless they have an attribute
            ``sees_groups`` that is true.
            If None, one after the other as many as take about 0.2 s, in slots the whole cohort.
        client_memory_gb: of what clients remember between rounds (see ``correction``), so many
            gigabytes (1e9 bytes) are kept in RAM, the rest in files of which pages are read as
            needed. Checkpoints hold up to 64 MB of it, more lies in ``client_memory`` beside them.
        client_state: patterns (``*``, ``?``) of names of buffers and frozen parameters that clients
            change while they train, which are then averaged as buffers are. What changes in the first
            local steps of the run is found without it, and so are statistics of batch and instance
            norm; name what changes later only. Other buffers are constants and do not travel.
        seed: root of every draw (cohorts, shuffling, dropout, augmentation); the run's seed,
            as given to `lightning.seed_everything`, if None.

    Raises:
        ConfigurationError: for values out of range, and at the start of the fit for a module,
            data module or Trainer that cannot be federated.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from fl_lightning.data import Digits, FederatedDataModule
        >>> from fl_lightning.models import ImageClassifier
        >>> module = ImageClassifier("lenet", num_classes=10, in_chans=1, image_size=32)
        >>> data = FederatedDataModule(Digits(image_size=32), num_clients=20)
        >>> trainer = Trainer(callbacks=[Federation(local_steps=1)], max_epochs=1)  # doctest: +SKIP
        >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        cohort: CohortSampler | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        correction: Correction | None = None,
        personal: Personalisation | None = None,
        updates: list[UpdateTransform | ErrorFeedback] | None = None,
        download: list[UpdateTransform] | None = None,
        aggregator: Aggregator | RobustRule | None = None,
        privacy: Privacy | ExampleDP | None = None,
        server_optimizer: ServerOptimizer | None = None,
        devices: Devices | None = None,
        asynchronous: AsyncRule | None = None,
        server_schedule: ServerSchedule | None = None,
        attackers: Attackers | None = None,
        stages: list[Stage] | None = None,
        on_client_failure: Literal["raise", "skip"] = "raise",
        min_replies: int = 1,
        engine: EngineName = "auto",
        slots: int | None = None,
        speedups: list[Speedup] | None = None,
        spot_check: float | None = None,
        clients_per_group: int | None = None,
        client_memory_gb: float = 2.0,
        client_state: list[str] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_values(
            local_steps=local_steps,
            local_epochs=local_epochs,
            on_client_failure=on_client_failure,
            min_replies=min_replies,
            clients_per_group=clients_per_group,
            client_memory_gb=client_memory_gb,
        )
        if asynchronous is not None:
            check_asynchronous(cohort, devices, correction, download)
            cohort = UniformCohort(size=asynchronous.buffer_size)  # who calibrates a mask, e.g.
        check_seed("federation", seed)
        self.cohort = cohort if cohort is not None else AllClients()
        self.engine = EngineOptions(
            engine, slots, None if speedups is None else tuple(speedups), spot_check
        )
        check_privacy(
            privacy,
            cohort=self.cohort,
            aggregator=aggregator,
            correction=correction,
            personal=personal,
            updates=updates or [],
            asynchronous=asynchronous,
            attackers=attackers,
            engine=self.engine,
        )
        if isinstance(privacy, ExampleDP):  # it has a local step of its own
            self.engine = EngineOptions("sequential")
        self.privacy = privacy
        check_secure(
            aggregator,
            updates=updates or [],
            correction=correction,
            asynchronous=asynchronous,
            attackers=attackers,
        )
        self.devices = devices
        self.asynchronous = asynchronous
        self.local_steps = local_steps
        self.local_epochs = local_epochs if local_steps or local_epochs else 1
        self.correction = correction
        self.personal = personal
        self.updates = list(updates or [])
        self.download = list(download or [])
        UpdatePath(self.updates, 0)  # these refuse what does not go together
        Broadcast(self.download, 0)
        self.aggregator = aggregator
        self.server_optimizer = server_optimizer or fedavg_optimizer
        self.server_schedule = server_schedule
        self.attackers = attackers
        self.on_client_failure: Literal["raise", "skip"] = on_client_failure
        self.min_replies = min_replies
        self.clients_per_group = clients_per_group
        self.client_memory_gb = client_memory_gb
        self.client_state = list(client_state or [])
        self.seed = run_seed(seed)
        self.stages: list[Stage] = list(stages or [])
        self.rounds: Round | None = None
        self.private: PrivateRounds | ExampleRounds | None = None
        self._saved: dict[str, Any] = {}
        self._personal_state: dict[str, Any] = {}
        self._accumulate = 1
        self._time = VirtualTime()
        self._cleanup = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the fit loop ask for groups of clients instead of batches."""
        if stage != "fit":
            return
        check_compatible(trainer, pl_module)
        check_by_hand(
            pl_module,
            cohort=self.cohort,
            correction=self.correction,
            personal=self.personal,
            privacy=self.privacy,
        )
        check_trainer(self.privacy, trainer)
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        check_shards(data, self.on_client_failure)
        if self.attackers is not None:
            self.attackers.enter(data)
            self._cleanup.callback(data.poison, [], None)
        population = Population(data.clients.num_examples)
        num_steps = self._num_steps(trainer.accumulate_grad_batches, data)
        self._time = VirtualTime.of(self.devices, self.asynchronous, num_steps, self.seed)
        groups = RoundGroups(
            self._time.cohort or self.cohort,
            population,
            self.seed,
            share=self._share(trainer, data),
            clients_per_group=self._num_together(trainer, pl_module, data),
            restarts=protects_clients(self.privacy) or as_aggregator(self.aggregator).restarts,
            limit=trainer.limit_train_batches or 1.0,  # with 0 Lightning does not train
            fewest=self._fewest_clients,
        )
        check_validation_interval(trainer, len(groups))
        most = self._most_clients(groups, population)
        check_cohort_size(most, self.min_replies, self.aggregator)
        check_trusted(self.aggregator, self.cohort, population.num_clients)
        if isinstance(self.aggregator, Protected):
            terms = Terms(most_clients=most, seed=self.seed, num_processes=trainer.world_size)
            self.aggregator.begin(terms)
        self._groups = groups
        data.train_in_rounds(groups)
        self._cleanup.callback(data.train_in_rounds, None)
        # A client accumulates its own batches. For Lightning a round accumulates its groups: so
        # global_step, step-wise schedules and the loggers' x axis advance once per round.
        self._accumulate = trainer.accumulate_grad_batches
        self._set(trainer, "accumulate_grad_batches", len(groups))
        self._set(trainer, "log_every_n_steps", 1)
        if trainer.limit_train_batches:  # which counts clients and not groups of them
            self._set(trainer, "limit_train_batches", 1.0)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the round runner on the weights and the optimizer that are now in place."""
        check_set_up(trainer)
        check_several(trainer, self.aggregator)
        check_data_fits(trainer)
        for config in trainer.lr_scheduler_configs:
            config.interval = "epoch"  # a step is a round, however many groups of clients it has
        check_correction(trainer, self.correction, self.personal)
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        private = privacy_at_work(
            trainer,
            self.privacy,
            self.cohort,
            self.seed,
            self.aggregator,
            cohort_size=self._groups.num_clients,
            num_steps=self._num_steps(self._accumulate, data),
            accumulate=self._accumulate,
        )
        aggregator = (
            private.aggregator
            if isinstance(private, PrivateRounds)
            else run_aggregator(trainer, self.aggregator, self.attackers)
        )
        run = Run.of(
            trainer,
            RunOptions(
                accumulate=self._accumulate,
                on_client_failure=self.on_client_failure,
                min_replies=self.min_replies,
                seed=self.seed,
                engine=self.engine,
                correction=self.correction,
                personal=self.personal,
                client_memory_bytes=self.client_memory_gb * 1e9,
                client_state=self.client_state,
            ),
            self._groups,
            LocalWork(
                self.local_steps,
                self.local_epochs,
                self._accumulate,
                self.seed,
                private if isinstance(private, ExampleRounds) else None,
            ),
        )
        stages = stages_of(
            run, aggregator, self._time, self.updates, self.download, self.stages, private
        )
        earlier, self.private = self.private, private
        self.rounds = Round(
            run,
            stages,
            lambda model: Server(model, aggregator, self.server_optimizer, self.server_schedule),
        )
        if self.correction is not None:
            self.correction.check_server(self.rounds.server.optimizer)
        if isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            trainer.strategy.checkpoint_io.files = self.rounds.memory.files_of_checkpoint
        self._groups_before = self._saved.get("groups", len(self._groups))
        if self._saved:
            load_run_state(self.rounds, self._saved)
            self._saved = {}
        elif trainer.current_epoch > 0:
            count_on(private, earlier)
        self._cleanup.callback(run.step.use, ())
        install(trainer, self.rounds)
        self._cleanup.enter_context(preserve_global_generators())
        for owner in (pl_module, data):
            self._cleanup.callback(GroupsPassBy(owner).remove)
        self._cleanup.callback(have_rounds_for_batches(trainer, self._groups))

    @property
    def _fewest_clients(self) -> int:
        """Of a cohort whose updates are not to be seen; a smaller one would show them."""
        if not isinstance(self.aggregator, Protected):
            return 1
        return max(FEWEST_CLIENTS, getattr(self.privacy, "min_shares", None) or 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from a checkpoint, also of a run whose rounds had another number of groups."""
        begin_next_round(trainer)
        if self._groups_before != len(self._groups):
            renumber_groups(trainer, self._groups_before, len(self._groups))
        assert self.rounds is not None
        announce_privacy(trainer, self.privacy, self.private, self.rounds)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow new masks, and let what hooks draw between rounds depend on the round alone."""
        assert self.rounds is not None
        self.rounds.follow_masks()  # ahead of any checkpoint, which would hold them already
        if num_left_out := self._groups.num_left_out(trainer.current_epoch):
            rank_zero_info(
                f"round {trainer.current_epoch}: a cohort of {num_left_out} is too small for "
                f"{type(self.aggregator).__name__}, which hides updates among those of "
                f"{self._fewest_clients} clients or more: nobody trains, the model stays as it is"
            )
        line = zero_rate_line(
            trainer.current_epoch,
            trainer.optimizers[0],
            self.rounds.server.optimizer,
            is_private=self.privacy is not None,
        )
        if line is not None:
            rank_zero_info(line)
        refresh_losses(
            trainer, self.cohort, self._groups.population, self.seed, self._own_layers(trainer)
        )
        seed_global_generators(derive_seed(self.seed, "round", trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the round: the clients' metrics and what else is known of it."""
        assert self.rounds is not None
        record, private = self.rounds.record, self.private
        if private is not None and self.rounds.server.is_open:  # it was broken off
            private.close(record)
        if private is not None:
            check_monitors(trainer, record.unprotected_names())
        metrics = record.metrics()
        shown = filter(self.rounds.in_progress_bar, metrics)
        log_round(trainer, metrics | record.facts(), in_progress_bar=list(shown))
        if private is not None:
            private.ledger.stop_within_budget(trainer, trainer.current_epoch + 1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give Trainer, module and data module back as they were."""
        self._cleanup.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Clean up after a run that failed or was interrupted as well."""
        self._cleanup.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the server's state for the checkpoint."""
        return self._saved if self.rounds is None else run_state(self.rounds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the fit starts."""
        self._saved = dict(state_dict)

    def personal_models(self, trainer: Trainer) -> PersonalModels | None:
        """Return what clients have for themselves after the last round, or by the checkpoint."""
        saved = self._saved or self._personal_state
        return recalled_models(trainer, self.personal, self.seed, self.rounds, saved)

    def _own_layers(self, trainer: Trainer) -> Having | None:
        """Return what has the module hold the layers that are a client's own, if there are any."""
        kind = self.personal
        if kind is None or kind.beside or kind.tuning_steps:
            return None
        models = self.personal_models(trainer)
        return None if models is None else models.of

    def personal_state(self) -> dict[str, Any]:
        """Return what another process needs to evaluate personal models, unless it is large."""
        return state_to_bring_home(self.rounds)

    def take_personal_state(self, state: dict[str, Any]) -> None:
        """Know personal models after a fit in other processes."""
        self._personal_state = state

    def _set(self, trainer: Trainer, name: str, value: Any) -> None:
        """Change a setting of the Trainer until the fit is over."""
        self._cleanup.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, value)

    def _num_together(
        self, trainer: Trainer, module: LightningModule, data: FederatedDataModule
    ) -> int:
        """Return how many clients make up a group."""
        if self.clients_per_group is not None:
            return self.clients_per_group
        per_epoch = data.clients.num_examples.mean() / data.batch_size
        per_client = float(self.local_steps or per_epoch * (self.local_epochs or 1))
        rounds: float | None = trainer.max_epochs
        rounds = math.inf if rounds is None or rounds < 0 else rounds
        cohort = self.cohort.expected_size(len(data.clients))
        by_hand = not module.automatic_optimization  # never in slots
        if not by_hand and trains_in_large_groups(
            self.engine, module, rounds * cohort * per_client
        ):
            return cohort
        interval = trainer.val_check_interval  # counts groups; 1.0, unlike 1, is the whole round
        if isinstance(interval, int) or interval != 1.0:
            return 1
        return num_short_clients(
            module, max(1.0, per_client * trainer.accumulate_grad_batches), data.batch_size
        )

    def _num_steps(self, accumulate: int, data: FederatedDataModule) -> npt.NDArray[np.int64]:
        """Return the local steps of every client's round."""
        batches = self._local_batches(data)
        return batches if self.local_steps else -(-batches // accumulate)

    def _local_batches(self, data: FederatedDataModule) -> npt.NDArray[np.int64]:
        """Return the batches, or with ``local_steps`` the steps, of every client's round."""
        return local_work(
            data.clients.num_examples,
            data.batch_size,
            drop_last=data.drop_last and not isinstance(self.privacy, ExampleDP),
            num_epochs=self.local_epochs,
            num_steps=self.local_steps,
        )

    def _share(self, trainer: Trainer, data: FederatedDataModule) -> Share | None:
        if trainer.world_size == 1:
            return None
        return Share(self._local_batches(data), trainer.global_rank, trainer.world_size)

    def _most_clients(self, groups: RoundGroups, population: Population) -> int:
        fixed = as_cohort(self.cohort).has_fixed_size
        return groups.num_clients if fixed else population.num_clients
