"""Asynchronous training of clients at sites.

A fixed number of clients train at any time, each on an order of its own; a site works on one order at a time.
A round is a server step: the server waits until its buffer is full of updates, and starts another client for
each. The clients that are started are drawn as in a simulation. The order of arrival depends on the network
and is recorded: a simulation with this record (`RecordedArrivals`) is bit-identical. A resumed run reads its
record from the checkpoint, and sends the orders of the clients that were training again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.client.clocks import (
    FILE,
    FinishedClient,
    RecordedClock,
    StartedClient,
    write_arrivals,
)
from fl_lightning.client.log_collector import LoggedMetrics
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ClientFailure, RoundFailure
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import (
    Arrivals,
    KeptVersions,
    Missing,
    Options,
    RoundRecord,
    Run,
    Stages,
    Start,
    Upload,
    check_same,
    own_run_folder,
)
from fl_lightning.flower.messages import Order
from fl_lightning.flower.server.correspondence import Reply
from fl_lightning.flower.server.remote_clients import Content, Counted
from fl_lightning.flower.server.sites import Sites
from fl_lightning.server.staleness import AsyncRule


@final
class VersionsAtSites(KeptVersions):
    """Keeps the versions of the global model from which clients at sites train, and records when updates arrive.

    Args:
        rule: options of asynchronous training.
        num_clients: number of clients.
        seed: seed by which clients to start are drawn.
        counted: gets the version from which each update that counts was trained.

    Attributes:
        arrivals: updates of each server step.
        next_end: waits for the next client that ends, among those that are training.
    """

    traits = NO_TRAITS
    next_end: Callable[[Sequence[StartedClient]], FinishedClient]

    def __init__(self, rule: AsyncRule, num_clients: int, seed: int, counted: Counted) -> None:
        super().__init__()
        self._rule, self._seed, self._counted = rule, seed, counted
        self._sizes = num_clients, rule.concurrency, rule.buffer_size
        self._common: dict[int, Content] = {}
        self._num_closed = 0
        self._begin(())

    def _begin(self, record: Sequence[FinishedClient]) -> None:
        self._clock = RecordedClock(record, lambda at_work: self.next_end(at_work))
        self.arrivals = Arrivals(self._clock, *self._sizes, self._seed)

    def enter(self, run: Run) -> None:
        """Choose the file to which the order of arrivals is written."""
        self._file = Path(own_run_folder(run.trainer), FILE)

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Keep a copy of the current global model, and drop versions from which no client trains any more."""
        needed = self.arrivals.step(round_index - 1).in_flight if round_index else frozenset()
        self._models = {v: kept for v, kept in self._models.items() if v in needed}
        self._common = {v: kept for v, kept in self._common.items() if v in needed}
        self._present = round_index
        self._models[round_index] = GlobalModel(model.params.clone(), model.buffers.clone())

    def note(self, options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep the options and tensors that all orders of the current model version share, besides the model."""
        self._common[self._present] = options, {n: t for n, t in tensors.items() if n != "model"}

    def kept(self, version: int) -> tuple[GlobalModel, Content]:
        """Return a version of the global model, and the options and tensors that its orders share."""
        return self._models[version], self._common[version]

    def before_step(self, record: RoundRecord) -> None:
        """Record the staleness and durations of the updates in a server step, and how many updates were lost."""
        step = self.arrivals.step(self._present)
        lost = sum(ended.is_lost for ended in self._clock.record[self._num_closed :])
        record.durations, self._counted.began = dict(step.durations), step.versions
        record.more |= {
            "round/staleness": step.staleness(self._present),
            "round/lost": float(lost),
        }

    def close(self, record: RoundRecord) -> None:
        """Write the order of arrivals to a file."""
        self._num_closed = len(self._clock.record)
        write_arrivals(self._file, self._clock.record, self._rule.buffer_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the arrivals up to the last server step, and the model versions from which clients still train."""
        return {
            "sizes": self._sizes,
            "record": [tuple(ended) for ended in self._clock.record[: self._num_closed]],
            "models": {version: dict(vars(model)) for version, model in self._models.items()},
            "common": dict(self._common),
        }

    def check(self, state: Any) -> None:
        """Raise if the checkpoint's numbers of clients, of clients at a time, or of updates per step are different."""
        if state is not None:
            check_same("federation.asynchronous", state.get("sizes"), self._sizes)

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Restore arrivals and model versions; clients that were training get their orders again."""
        self._begin([FinishedClient(*ended) for ended in state["record"]])
        self._num_closed = len(self._clock.record)
        self._models = {version: GlobalModel(**kept) for version, kept in state["models"].items()}
        self._common = dict(state["common"])


@final
class AsynchronousSites(Sites):
    """Trains clients at their sites, and uses updates in the order of their arrival.

    Args:
        run: run of the server.
        options: options of the federation.
        stages: stages of the run.
        versions: stage that keeps versions of the model.
        given: further arguments of `Sites`.
    """

    def __init__(
        self,
        run: Run,
        options: Options,
        stages: Stages,
        *,
        versions: VersionsAtSites,
        **given: Any,
    ) -> None:
        super().__init__(run, options, stages, **given)
        self._versions = versions
        versions.next_end = self._next_end
        self._asked: dict[int, float] = {}  # time of each order, by the number of the start
        self._replies: dict[int, Reply] = {}  # replies that no server step has used, by client
        self._lost_in_a_row = 0

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients until the buffer of updates is full, and yield these updates."""
        packing = self._packing()
        self._versions.note(*self._common(start, packing))
        step = self._versions.arrivals.step(self._run.round_index)
        sums: list[LoggedMetrics] = []
        for version, client in sorted((v, c) for c, v in step.versions.items()):  # as simulated
            reply = self._replies.pop(client)
            told: dict[str, LoggedMetrics] = {}
            self._note_sums(reply, told)
            sums += told.values()
            [part] = reply.parts
            began = self._versions.start(version, start)
            yield self._upload_of(part, began, packing, len(step.versions))
        self.collector.pool_metrics(sums, self._run.module)

    def _next_end(self, at_work: Sequence[StartedClient]) -> FinishedClient:
        """Send orders to started clients that have none yet, and return the next client that ends."""
        correspondence = self._remote.correspondence
        for visit in at_work:
            if visit.number not in self._asked:
                self._asked[visit.number] = time.monotonic()
                correspondence.post(self._remote.site_of[visit.client], self._order_to(visit))
        reply = correspondence.next_reply()
        [client] = reply.order.clients
        [visit] = [visit for visit in at_work if visit.client == client]
        seconds = time.monotonic() - self._asked.pop(visit.number)
        if reply.answer is None:
            self._skip(client, reply, at_work)
        else:
            self._replies[client], self._lost_in_a_row = reply, 0
        return FinishedClient(client, visit.version, seconds, is_lost=reply.answer is None)

    def _order_to(self, visit: StartedClient) -> Order:
        """Return the order for a client that is training, with equal bytes at every call."""
        model, (options, tensors) = self._versions.kept(visit.version)
        told = {"model": self._packing().model(model, visit.version), **tensors}
        return self._remote.order("train", (visit.client,), (options, told), visit.version)

    def _skip(self, client: int, reply: Reply, at_work: Sequence[StartedClient]) -> None:
        """Skip a client whose site has not answered its order, or end the run if the options say so.

        Args:
            client: id of the client.
            reply: reply of its site, without an answer.
            at_work: clients that were training, this one included.

        Raises:
            ClientFailure: if the options say that a failure ends the run.
            RoundFailure: if too many orders in a row had no answer.
        """
        failure = ClientFailure(client, f"at site {reply.site}: {reply.reason}")
        if self._options.on_client_failure == "raise":
            self.lose(failure)
        rank_zero_warn(
            f"round {self._run.round_index + 1}, {failure}: another client is started instead"
        )
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= max(len(at_work), len(set(self._remote.site_of.values()))):
            raise RoundFailure(
                f"round {self._run.round_index + 1}: {self._lost_in_a_row} orders in a row had no answer, the "
                f"last {failure}"
            )


def sites_for(options: Options, counted: Counted, num_clients: int) -> Callable[..., Sites]:
    """Return the constructor of `Sites`, or of `AsynchronousSites` for an asynchronous run.

    Args:
        options: options of the federation; an asynchronous run adds a stage to them.
        counted: gets the version from which each update that counts was trained.
        num_clients: number of clients at all sites.
    """
    rule = options.asynchronous
    if rule is None:
        return Sites
    versions = VersionsAtSites(rule, num_clients, options.seed, counted)
    options.handed.append(versions)
    return partial(AsynchronousSites, versions=versions)
