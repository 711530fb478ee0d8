"""The rounds of a fit, as Lightning's loop drives them: a round is a batch and an epoch.

Each of several processes has a `FitRounds`. It trains its share of the cohort, exchanges results with
the other processes once per round, and then takes the same server step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.update import GlobalModel
from fl_lightning.engines import CannotStack
from fl_lightning.federation.clients.fit_clients import FitClients
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.exchange import Failure, exchange
from fl_lightning.federation.round import Round
from fl_lightning.federation.round_cohorts import CohortBatch
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages
from fl_lightning.server.server import Server

# Rates below this fraction of the initial one count as 0: some cosine schedules of torch end at 1e-18.
_NOTHING = 1e-9


class FitRounds:
    """Runs the federated rounds of one Trainer fit, in each of its processes.

    Attributes:
        clients: trains the clients and yields their updates.
        server: holds the global model, aggregates updates and steps.
        memory: client states that last from round to round.
        module_has_all: whether the module can hold every bit of the server's model.
        is_kept_by_lightning: whether Lightning's checkpoints can hold every bit of it as well.
        error_of_close: error of a stage when the round closed; None without one. It is raised at the end of the
            epoch, when Lightning has counted the round and advanced the schedules.
    """

    error_of_close: BaseException | None = None

    def __init__(
        self,
        run: Run,
        options: Options,
        stages: Stages,
        make_server: Callable[[GlobalModel], Server],
    ) -> None:
        self.run, self.options, self.stages, self.memory = run, options, stages, run.memory
        self.clients: FitClients = (options.clients_side or FitClients)(run, options, stages)
        self.server = make_server(run.local.read())
        self._place(None)
        self._round = Round(
            self.clients,
            self.server,
            stages,
            run.memory,
            skips_failures=options.on_client_failure == "skip",
            min_replies=options.min_replies,
        )
        self.clients.lose = self._round.raise_or_skip
        self._cost_is_told = False

    @property
    def record(self) -> RoundRecord:
        """Counts and metrics of the current round; between rounds, those of the last round."""
        return self._round.record

    def train(self, cohort: CohortBatch) -> None:
        """Train the clients of the current round and step the server.

        After an error the module holds the global model.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped. Several
                processes all raise it, when they exchange results.
            RoundFailure: if fewer clients than ``min_replies`` sent a valid update.
        """
        began, run, clients = time.perf_counter(), self.run, self.clients
        if run.local.state_names is None and clients.find_state(cohort, run.ranks):
            self.follow_state()
        self._begin()
        failure: Failure | None = None
        try:
            with clients.metrics_kept_apart():
                if not clients.engine.is_chosen:
                    clients.choose_engine(self.server.model, cohort, run.ranks)
                if clients.engine.slots is None:
                    self._round.train(cohort.ids)
                else:
                    self._train_in_slots(cohort)
                run.local.check_constants()
        except (ClientFailure, ConfigurationError) as error:
            if run.ranks.size == 1:
                raise
            failure = error
        finally:
            clients.restore(self.server.model)
        self._round.record.seconds += time.perf_counter() - began
        if run.ranks.size > 1:  # waiting for other processes is no work
            self._round.record = exchange(run, self._round.record, self.server, failure)
        self._close()

    def _train_in_slots(self, cohort: CohortBatch) -> None:
        """Train clients in slots (many at once). If slots cannot run a step, restart the round with another engine."""
        metrics = MetricStates(metrics_of(self.run.module))
        while True:
            try:
                self._round.train(cohort.ids)
            except CannotStack as reason:
                self.clients.engine.fall_back(reason)
                metrics.put_back()
                self.run.local.restore(self.server.model)
                self._begin()
            else:
                return

    def _begin(self) -> None:
        """Open a round, or open it again after slots failed; processes do not communicate here."""
        run, number = self.run, self.run.trainer.current_epoch
        self.follow_masks()
        run.local.start_round(number)  # by now, unlike earlier, Lightning has restored all
        if self.module_has_all:  # hooks between rounds may have changed it
            run.local.space.read(out=self.server.model.params)
            run.local.buffers.read(out=self.server.model.buffers)
        if not self._cost_is_told:  # not before hooks have changed the model for the last time
            self._cost_is_told = True
            self._announce()
        self._round.open(number)

    def _close(self) -> None:
        """Step the server and put the new model into the module."""
        began, run, record = time.perf_counter(), self.run, self._round.record
        # before the step, as metrics of the module may fail
        with self.clients.metrics_kept_apart():
            record.pooled = run.collector.collect_metrics(run.module)
        if self.clients.rehearsal.failures:
            self.clients.rehearsal.warn_of_failures(record)
        self._round.step()
        run.local.end_round(self.server.model)
        run.cohorts.finish()  # only now: a round that failed is not done
        # in a checkpoint it would tell who took part; no cohort that goes with privacy depends on it
        if not (self.stages.hides_clients or self.stages.is_private):
            run.cohorts.population.note(  # for cohorts that choose by what it has shown of clients
                record.finished,
                round_index=run.trainer.current_epoch,
                losses=record.means.by_client("train/loss"),
                durations=record.durations,
            )
        record.seconds += time.perf_counter() - began
        try:
            self._round.close()
        except BaseException as error:  # noqa: BLE001 - raised again, see `error_of_close`
            self.error_of_close = error

    def follow_state(self) -> None:
        """Give the server's model the buffers that clients change, once it is known which these are."""
        self.server.replace_buffers(self.run.local.buffers.read())
        self._note_precision()

    def follow_masks(self) -> None:
        """Change the layout of the exchanged vectors if sparsity masks have changed since the last round.

        Raises:
            ConfigurationError: if they may not change.
        """
        local = self.run.local
        if not local.masks.are_new:
            return
        before, kept = local.space, self.is_kept_by_lightning
        self.clients.renew_space()
        after = local.space
        if (after.names, after.mask_fingerprint()) == (before.names, before.mask_fingerprint()):
            return  # the same ones were set again, as resuming does
        positions = after.positions_in(before)
        model = local.read()
        if not kept:  # the server's model has bits that the module lacks
            old = self.server.model
            known = old.params[positions.clamp(min=0)]
            model = GlobalModel(torch.where(positions >= 0, known, model.params), old.buffers)
        self._place(positions)
        self.server.relocate(model, positions)

    def _place(self, positions: Tensor | None) -> None:
        for stage in self.stages:
            stage.place(self.run.local.space, positions)
        self._note_precision()

    def _note_precision(self) -> None:
        spaces = (self.run.local.space, self.run.local.buffers)
        saved = self.run.module.state_dict().keys()
        self.module_has_all = all(s.is_lossless and saved >= set(s.names) for s in spaces)
        # Lightning loads a checkpoint's weights before it makes a module one of double precision
        self.is_kept_by_lightning = self.module_has_all and all(
            s.dtype == torch.float32 for s in spaces
        )

    def idle_lines(self) -> Iterator[str]:
        """Yield a log line if the cohort is too small to train, and another if a learning rate is 0."""
        number, options, cohorts = self.run.trainer.current_epoch, self.options, self.run.cohorts
        if cohorts.fewest > 1 and (num_left_out := cohorts.num_left_out(number)):
            yield (
                f"round {number + 1}: a cohort of {num_left_out} is too small for "
                f"{type(options.aggregator).__name__}, which hides an update among those of {cohorts.fewest} or "
                "more clients: no client trains, and the model does not change"
            )
        # rates that schedules change from step to step are not known here
        clients = () if self.run.by_step else self.run.trainer.optimizers[:1]
        pairs = [("the clients'", each) for each in clients]
        pairs.append(("the server's", self.server.optimizer))
        idle = [
            whose
            for whose, optimizer in pairs
            if all(
                float(group["lr"]) <= _NOTHING * float(group.get("initial_lr", 1.0))
                for group in optimizer.param_groups
            )
        ]
        if idle:
            noise = "; the noise of privacy is all that is left" if options.privacy else ""
            yield (
                f"round {number + 1}: a learning rate is 0, so the model does not change ({' and '.join(idle)})"
                f"{noise}. Let the schedule reach 0 after the last round"
            )

    def _announce(self) -> None:
        num_clients = self.run.cohorts.num_clients
        pairs = [s.more_bytes(self.server.model, num_clients) for s in self.stages]
        up, down = map(sum, zip(*pairs, strict=True))
        line = cost_line(up, down, num_clients=num_clients, num_rounds=self.run.num_rounds)
        rank_zero_info(f"bytes: {line}")


def cost_line(up: float, down: float, *, num_clients: int, num_rounds: float) -> str:
    """Return a log line on traffic: bytes of one client per round, and of all clients in the whole run.

    Args:
        up: approximate bytes that a client sends per round.
        down: approximate bytes that a client receives per round.
        num_clients: clients per round.
        num_rounds: rounds of the run; infinite if no end is planned.

    Example:
        >>> cost_line(4e6, 4e6, num_clients=1, num_rounds=50)
        'a client sends about 4 MB and receives 4 MB a round; 1 client in 50 rounds: 200 MB and 200 MB'
    """
    line = f"a client sends about {_shown(up)} and receives {_shown(down)} a round"
    if not math.isfinite(num_rounds):
        return line
    total = num_clients * num_rounds
    clients = f"{num_clients} client{'s' * (num_clients != 1)}"
    rounds = f"{num_rounds:g} round{'s' * (num_rounds != 1)}"
    return f"{line}; {clients} in {rounds}: {_shown(total * up)} and {_shown(total * down)}"


def _shown(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
