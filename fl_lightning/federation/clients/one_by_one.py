"""Clients that train one after the other in one module, with the stages' contexts.

Weights, optimizer state, attributes and fp16 scale of a client never reach the next client.
Torchmetrics objects pool over the cohort; a client that fails is removed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.client.state.attributes import Attributes
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import LocalTraining, Missing, Stages, Start, Upload
from fl_lightning.federation.visits.local_counts import LocalCounts
from fl_lightning.updates.message import bytes_up


class OneByOne:
    """Trains clients one after the other.

    Args:
        run: the run.
        stages: the stages of the round.
        counts: counters of the client that trains, which the Trainer shows; None without a Trainer.
    """

    def __init__(self, run: Run, stages: Stages, counts: LocalCounts | None = None) -> None:
        self._module, self._local, self._plan = run.module, run.local, run.plan
        self._collector, self._stages = run.collector, stages
        self._counts = counts or LocalCounts()
        self._metrics = metrics_of(run.module)
        self._watches = True

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients that start from the same model and options, and yield their updates or failures.

        Afterwards the module holds the last client's model.
        """
        with self._collector.listening_to(self._module):
            try:
                for client in list(work):
                    self._counts.work = client
                    train = self._watched if self._watches else self._train
                    sent = train(client, start)
                    yield sent
                    del sent
            finally:
                self._counts.work = None
                if self._counts.reads_rounds:
                    self._counts.tell_of_rounds()

    def _watched(self, work: ClientWork, start: Start) -> Upload | Missing:
        """Train the first client, and log the name of a global, closure or class attribute that its steps change."""
        self._watches = False
        outside = Attributes(self._module, ignore=NOT_THE_USERS, outside=True)
        sent = self._train(work, start)
        if changes := outside.changes(outside=True):
            rank_zero_info(
                f"state: training_step changes {changes[0]}, which is not restored between clients: make it an "
                "attribute of the module if every client is to start from its value at the round's start"
            )
        return sent

    def _train(self, work: ClientWork, start: Start) -> Upload | Missing:
        training = LocalTraining(work, start, num_bytes=start.num_bytes)
        metrics = MetricStates(self._metrics) if self._metrics else None
        try:
            update, remember = self._run(training)
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            if metrics is not None:
                metrics.put_back()
            if not isinstance(error, ClientFailure):
                raise
            return Missing(start._replace(num_bytes=training.num_bytes), error)
        if remember is not None:
            remember()
        self._local.keeps_lists = True
        made = Updates.of(update)
        updates = without_buffers(made) if self._stages.is_private else made
        start = start._replace(num_bytes=training.num_bytes)
        return Upload(start, updates, updates, bytes_up(updates))

    def train_alone(self, training: LocalTraining) -> ClientUpdate:
        """Train a client for a trial or check, and return its update, which is not aggregated."""
        with self._counts.of(training.work):
            return self._run(training)[0]

    def _run(self, training: LocalTraining) -> tuple[ClientUpdate, Callable[[], None] | None]:
        """Train a client; return its update and a function that stores its new states, None if it has none."""
        having, work, remember = self._stages.having, training.work, None
        with ExitStack() as around:
            for stage in having["around"]:
                around.enter_context(stage.around(training))
            with ExitStack() as steps:
                for stage in having["steps"]:
                    steps.enter_context(stage.steps(training))
                seed_global_generators(work.seed)
                training.update = update = self._local.train(
                    training.start.model,
                    client_id=work.client_id,
                    num_examples=work.num_examples,
                    batches=self._plan.steps(work),
                    masks=training.masks,
                )
            if self._local.check_loss is not None:
                self._local.check_loss(update)
            if training.counts and self._stages.learns:
                remember = self._stages.learn(update, work, training.start)
        return update, remember


def without_buffers(updates: Updates) -> Updates:
    """Return updates without buffers, as clients of a private run send them."""
    return replace(updates, buffers=updates.buffers[:, :0])
