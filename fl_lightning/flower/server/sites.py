"""Training of clients at sites: the server sends orders, and reads updates from the answers.

Updates are used in the order of the cohort, in whatever order they arrive, so that a sum is bit-identical to a
simulation's. Stages up to `Transport` have processed an update at its site; later ones run at the server.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.client.log_collector import LoggedMetrics
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ClientFailure, RoundFailure
from fl_lightning.core.metrics import PER_EXAMPLE
from fl_lightning.core.traits import check_together
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation import (
    NETWORK,
    FitClients,
    Missing,
    Options,
    Ranks,
    Run,
    SecureRounds,
    SpansNetwork,
    Stages,
    Start,
    Transport,
    Upload,
    client_masks,
)
from fl_lightning.flower.messages import Answer, ClientAnswer, Kind, Order
from fl_lightning.flower.packing import (
    OPTION,
    SUMS,
    Packing,
    Recalibrates,
    constants_digest,
    of_stage,
    read_metrics,
)
from fl_lightning.flower.server.correspondence import Part, Reply, in_order
from fl_lightning.flower.server.elsewhere import WorkElsewhere
from fl_lightning.flower.server.remote_clients import ClientsAtSites, Content
from fl_lightning.flower.server.sums import EncryptedOverSites, SumOverSites
from fl_lightning.flower.site.rounds import ERROR, NORM, options_of
from fl_lightning.flower.sums import trained_on
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.server.server import as_aggregator


class Sites(FitClients):
    """Trains a round's clients at their sites: sends orders, and reads the updates from the answers.

    Args:
        run: run of the server.
        options: options of the federation.
        stages: stages of the run.
        remote: clients of the run.
        signing_keys: public keys that verify the sites' messages in secure sums, by site.
    """

    def __init__(
        self,
        run: Run,
        options: Options,
        stages: Stages,
        *,
        remote: ClientsAtSites,
        signing_keys: Mapping[str, bytes],
    ) -> None:
        super().__init__(run, options, stages)
        self.plan = WorkElsewhere(run.data, options.seed)
        for stage in options.handed:
            check_together({type(stage).__name__: stage.traits, **NETWORK})
        self._talking = [stage for stage in stages if isinstance(stage, SpansNetwork)]
        self._remote = remote
        self._kinds: dict[str, Any] = {}  # reduction of each metric over clients; None for the mean
        self._constants_of: tuple[str, str] | None = None
        run.data.evaluated_by = self.evaluate
        self._transport = next(stage for stage in stages if isinstance(stage, Transport))
        self._masks_of_clients = client_masks(run.trainer)  # which sites compute for themselves
        _, self.stages_ahead = stages.around(self._transport)
        hidden = next((stage for stage in stages if isinstance(stage, SecureRounds)), None)
        self._trained_on = ""  # hash of the orders of the current round, for hidden sums
        self._sums = None if hidden is None else hidden.aggregator
        if self._sums is not None:
            is_encrypted = isinstance(self._sums.agreed_sum, EncryptedSum)
            self._sums.sum_at_sites(
                EncryptedOverSites(remote, self._lose)
                if is_encrypted
                else SumOverSites(remote, self._lose, signing_keys, lambda: self._trained_on)
            )

    def _lose(self, client: int, reason: str) -> None:
        self.lose(ClientFailure(client, reason))

    def find_state(self, group: Iterable[int], ranks: Ranks) -> bool:
        """Find the names of the state that clients keep between rounds, from the configuration alone."""
        self.local.set_state(self.rehearsal.known)
        return True

    def choose_engine(self, model: GlobalModel, group: Iterable[int], ranks: Ranks) -> None:
        """Do nothing: sites choose their own engines."""

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Send the orders of a round, and yield the updates in the order of the clients."""
        clients, packing = work.client_ids.tolist(), self._packing()
        common = self._common(start, packing)
        orders = self._orders("train", clients, common)
        self._trained_on = trained_on(next(iter(orders.values()))) if orders and self._sums else ""
        sums: dict[str, LoggedMetrics] = {}

        def parts() -> Iterator[Part]:
            for reply in self._remote.ask(orders):
                self._note_sums(reply, sums)
                yield from reply.parts

        for part in in_order(clients, parts()):
            yield self._upload_of(part, start, packing, len(clients))
        self.collector.pool_metrics([sums[site] for site in sorted(sums)], self._run.module)

    def evaluate(self, stage: str, clients: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Return metrics of the module's model on each client's held-out examples, which sites compute, by client.

        Args:
            stage: ``validation`` or ``test``.
            clients: clients to evaluate; clients of a site without an answer are left out, with a warning.
        """
        model = self._packing().model(self.local.read(), self._run.round_index, whole=True)
        tensors, module = {"model": model}, self._run.module
        if isinstance(module, Recalibrates):
            told = module.statistics().items()
            tensors |= {f"{SUMS}{name}": own.detach().cpu() for name, own in told}
        orders = self._orders("evaluate", clients, (self._agreed() | {"stage": stage}, tensors))
        found: dict[int, dict[str, Tensor]] = {}
        for reply in self._remote.ask(orders):
            if reply.answer is None:
                rank_zero_warn(f"per-client evaluation: without site {reply.site}: {reply.reason}")
                continue
            for answer in reply.answer.clients:
                try:
                    check_metrics(answer.metrics)
                except ValueError as error:
                    client = f"client {answer.client} at site {reply.site}"
                    rank_zero_warn(f"per-client evaluation: without {client}: {error}")
                    continue
                if answer.metrics:
                    found[answer.client] = dict(answer.metrics)
        if orders and not found:
            rank_zero_warn("per-client evaluation: no site releases metrics of single clients")
        return found

    def _orders(self, kind: Kind, clients: Iterable[int], content: Content) -> dict[str, Order]:
        """Return the orders of the current round, one per site, by site."""
        return self._remote.orders(kind, clients, lambda _: content, self._run.round_index)

    def _note_sums(self, reply: Reply, sums: dict[str, LoggedMetrics]) -> None:
        """Read logged metrics from a site's reply: states of torchmetrics objects, and how to reduce other metrics."""
        if reply.answer is None:
            return
        logged, tensors = reply.answer.options.get(OPTION, []), reply.answer.tensors
        self._note_reductions(reply.site, reply.answer)
        try:
            told = read_metrics(logged, tensors, self._run.module)
            if names := [entry[1] for entry in told.logged if _OF_SERVER.match(entry[1])]:
                raise ValueError(f"it logs {names[0]}, a name of the server's own metrics")
            sums[reply.site] = told
        except ValueError as error:
            rank_zero_warn(f"site {reply.site}: its metrics are left out: {error}")

    def _note_reductions(self, site: str, answer: Answer) -> None:
        """Reduce a metric over clients by the sum, minimum or maximum if all sites report this way, else by the mean."""
        told = answer.options.get("reductions")
        kinds = told if isinstance(told, dict) else {}
        for name in sorted({name for client in answer.clients for name in client.metrics}):
            if _OF_SERVER.match(name):
                rank_zero_warn(
                    f"site {site}: {name} is left out: it is a name of the server's own metrics"
                )
            kind = kinds.get(name)
            if self._kinds.setdefault(name, kind) != kind:
                rank_zero_warn(
                    f"site {site} reduces {name} over clients in another way than other sites: the mean is logged"
                )
                self._kinds[name] = None
            self.collector.reductions.pop(name, None)
            if (kind := self._kinds[name]) in ("sum", "min", "max"):
                self.collector.reductions[name] = kind

    def _packing(self) -> Packing:
        num_up = 0 if self._stages.is_private else self.local.buffers.size
        return Packing(self._transport, self.local.space, self.local.buffers.size, num_up)

    def _common(self, start: Start, packing: Packing) -> Content:
        """Return the options and tensors that all orders to train in the current round share."""
        number = self._run.round_index
        tensors = {"model": packing.model(start.present, number)}
        for stage in self._talking:
            told = stage.to_sites().items()
            tensors |= {f"stage/{stage.key}/{name}": tensor.cpu() for name, tensor in told}
        trainer = self._run.trainer
        options = self._agreed() | {"optimizers": options_of(trainer.optimizers)}
        options["num_rounds"] = trainer.max_epochs
        if by_step := self.local.round_start.by_step:
            options["by_step"] = by_step
        if self._sums is not None:
            options["most_clients"] = self._sums.terms.most_clients
        return options, tensors

    def _agreed(self) -> dict[str, Any]:
        """Return facts about the model that orders contain because server and sites must agree on them."""
        return {
            "num_clients": self._run.cohorts.population.num_clients,
            "state": self.local.state_names or [],
            "buffers_stay": self._stages.is_private,
            "constants": self._constants,
            "mask": self._remote.mask,
        }

    @property
    def _constants(self) -> str:
        """SHA-256 of the module's tensors that are neither sent nor personal, computed once per mask."""
        mask = self._remote.mask
        if self._constants_of is None or self._constants_of[0] != mask:
            self._constants_of = mask, constants_digest(self._run.module, self.local)
        return self._constants_of[1]

    def _upload_of(
        self, part: Part, start: Start, packing: Packing, num_updates: int
    ) -> Upload | Missing:
        """Return a client's checked update as the stage `Transport` yields it, or the reason that it is missing.

        Args:
            part: the client's part of a site's reply.
            start: start of the clients of the round.
            packing: reads updates.
            num_updates: number of updates of the round, those that are missing included.
        """
        start = start._replace(num_bytes=part.bytes_down)
        aggregator = as_aggregator(self._options.aggregator)
        try:
            if part.answer is None:
                raise ValueError(part.reason)
            num_examples = int(self._run.data.clients.num_examples[part.client])
            counts_steps = aggregator.needs_effective_steps
            check_plausible(part.answer, num_examples, counts_steps=counts_steps)
            update = self._read(part.answer, part, packing)
            aggregator.check(update, num_updates)
            return self._upload(part.answer, part, start, update)
        except (ClientFailure, RoundFailure, ValueError, KeyError) as error:
            reason = error.reason if isinstance(error, ClientFailure) else error
            failure = ClientFailure(part.client, f"at site {part.reply.site}: {reason}")
            return Missing(start, failure)

    def _read(self, answer: ClientAnswer, part: Part, packing: Packing) -> ClientUpdate:
        """Return a client's update; it has no coordinates if a secure or encrypted sum hides them."""
        if self._sums is None:
            payload, began = part.tensors.get("payload"), part.reply.order.round
            active = None
            if self._masks_of_clients is not None:
                active = self.local.space.coordinates(self._masks_of_clients(answer.client))
            opened = packing.opened_update(payload, answer, began, active)
        else:
            nothing = torch.empty(0, dtype=self.local.space.dtype)
            given = answer.client, nothing, nothing, answer.num_examples, answer.num_steps
            opened = ClientUpdate(*given)
        return replace(
            opened,
            metrics={n: v for n, v in answer.metrics.items() if not _OF_SERVER.match(n)},
            effective_steps=answer.effective_steps,
            optimizer_steps=answer.optimizer_steps,
        )

    def _upload(
        self, answer: ClientAnswer, part: Part, start: Start, update: ClientUpdate
    ) -> Upload:
        for stage in self._talking:
            stage.from_site(answer.client, of_stage(f"stage/{stage.key}/", part.tensors))
        arrived = Updates.of(update)
        if not self._transport.is_lossy:
            return Upload(start, arrived, arrived, part.bytes_up)
        made = Updates.of(replace(update))
        facts = {n: torch.tensor(v, dtype=update.delta.dtype) for n, v in answer.facts.items()}
        if NORM in facts:
            vars(next(iter(made)))["norm"] = facts[NORM]  # of what the client has sent, in full
        return Upload(start, made, arrived, part.bytes_up, facts.get(ERROR))


# names of numbers that the server measures itself, which no client may replace
_OF_SERVER = re.compile(r"(val|test|round|privacy)(/|_|$)")
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LEAST_STEPS, MOST_STEPS = 1e-6, 2**40  # updates are divided by effective steps
MOST_PER_EXAMPLE = 1e6  # weight of a logged mean, e.g. tokens of an example


def check_plausible(answer: ClientAnswer, num_examples: int, *, counts_steps: bool) -> None:
    """Raise if a number in the answer of a client is out of range.

    Args:
        answer: answer of a client that has not failed.
        num_examples: number of its examples, as its site has reported at the start.
        counts_steps: True if the aggregator needs the number of gradients that an update sums up.

    Raises:
        ValueError: naming the number.
    """
    if answer.num_examples != num_examples:
        raise ValueError(
            f"its update has {answer.num_examples} examples, and its site reported {num_examples} at the "
            "start"
        )
    steps = answer.optimizer_steps
    of_optimizers = steps if isinstance(steps, tuple) else () if steps is None else (steps,)
    if not 0 < answer.num_steps <= MOST_STEPS or max(of_optimizers, default=0) > MOST_STEPS:
        raise ValueError(
            f"it has {answer.num_steps} local steps and {steps} steps of optimizers, of which at most "
            f"{MOST_STEPS} are allowed and at least one must be local"
        )
    effective = answer.effective_steps
    if counts_steps and not (effective is not None and LEAST_STEPS <= effective <= MOST_STEPS):
        raise ValueError(
            f"its update sums up {effective} gradients, allowed are {LEAST_STEPS} to {MOST_STEPS}"
        )
    check_metrics(answer.metrics)


def check_metrics(metrics: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a client's metrics are not real numbers, or the weight of a mean is out of range."""
    for name, metric in metrics.items():
        if metric.dtype not in (*_REAL, *_WHOLE):
            raise ValueError(f"its metric {name} has the dtype {metric.dtype}")
        if name.endswith(PER_EXAMPLE) and not bool((metric > 0) & (metric <= MOST_PER_EXAMPLE)):
            raise ValueError(
                f"its weight {name} is {float(metric)}, and must be above 0 and at most {MOST_PER_EXAMPLE:g}"
            )
