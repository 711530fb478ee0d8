"""Clients at sites: the orders of a run, and the facts that a site reports in answer to the first one.

The first order, the greeting (``hello``), has the configuration of the run and the current mask. Every order has
the last round in which each client counted, so that sites know which client state is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, check_hex, check_whole, shown
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import RoundRecord, Stage
from fl_lightning.flower.documents import Positive, check_fields, read_document
from fl_lightning.flower.messages import Answer, Kind, Order, digest
from fl_lightning.flower.packing import (
    SUMS,
    VALUES,
    RunMask,
    mask_tensors,
    model_tensors,
    of_stage,
)
from fl_lightning.flower.server.correspondence import Correspondence, Part, Reply, in_order

T = TypeVar("T")
Content = tuple[Mapping[str, Any], Mapping[str, Tensor]]  # options and tensors of an order


class ClientsAtSites:
    """The clients of a run, which the server reaches through their sites.

    Args:
        correspondence: exchange of messages with the sites.
        configuration: configuration of the run, as YAML.
        counted: records the id of the run, and the last round in which each client's update was used.
        trainer: Trainer of the server.
        mask: returns the current mask of the run; None if there is none.

    Attributes:
        correspondence: exchange of messages with the sites.
        site_of: name of the site of each client; empty before the sites are greeted.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        configuration: str,
        counted: Counted,
        trainer: Trainer,
        mask: Callable[[], RunMask | None],
    ) -> None:
        self.correspondence, self.site_of = correspondence, dict[int, str]()
        self._configuration, self._digest = configuration, digest(configuration.encode())
        self._counted, self._trainer, self._current_mask = counted, trainer, mask
        self._sent_mask = ""  # name of the mask that was sent to all sites

    def greet(self, wanted: int) -> dict[str, SiteFacts]:
        """Wait until enough sites are connected, send each the run's first order, and return facts about each site.

        Raises:
            ConfigurationError: if a site refuses, or its facts are not valid.
        """
        told = facts_of(self.correspondence.greet(self._greeting, wanted))
        for site, facts in told.items():
            for client in facts.clients:
                if (other := self.site_of.setdefault(client, site)) != site:
                    raise ConfigurationError(
                        f"sites {other} and {site} both have client {client}: change clients in one site.yaml"
                    )
        return told

    @property
    def mask(self) -> str:
        """Number and hash of the current mask, as text; empty if there is none."""
        mask = self._current_mask()
        return "" if mask is None else str(mask)

    def _greeting(self) -> Order:
        """Return the run's first order (``hello``); if there is a mask, with the mask and the whole model.

        Training may have changed entries that are frozen now, and later orders leave them out.
        """
        options: dict[str, Any] = {"configuration": self._configuration}
        tensors: dict[str, Tensor] = {}
        if (mask := self._current_mask()) is not None:
            more, tensors = mask_tensors(mask)
            options |= more
            options["num_clients"] = len(self._trainer.datamodule.clients)  # type: ignore[attr-defined]
            tensors |= model_tensors(self._trainer.lightning_module)
        order = self.order("hello", (), (options, tensors), self._trainer.current_epoch)
        return replace(order, counted=self._counted.rounds)

    def order(
        self, kind: Kind, clients: tuple[int, ...], content: Content, round_index: int
    ) -> Order:
        """Return an order of the run, with the last round in which each of its clients counted."""
        rounds, (options, tensors) = self._counted.rounds, content
        return Order(
            kind=kind,
            run=self._counted.run,
            configuration=self._digest,
            round=round_index,
            clients=clients,
            counted={client: rounds.get(client, -1) for client in clients},
            options=options,
            tensors=tensors,
        )

    def by_site(self, clients: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Group clients by their sites, in the order given."""
        found: dict[str, list[int]] = {}
        for client in clients:
            found.setdefault(self.site_of[client], []).append(client)
        return {site: tuple(some) for site, some in found.items()}

    def orders(
        self,
        kind: Kind,
        clients: Iterable[int],
        content: Callable[[tuple[int, ...]], Content],
        round_index: int,
    ) -> dict[str, Order]:
        """Return one order for each site that has at least one of the clients, by site.

        Args:
            kind: kind of the orders.
            clients: ids of the clients.
            content: returns options and tensors for some clients, those of one site.
            round_index: number of the round.
        """
        return {
            site: self.order(kind, some, content(some), round_index)
            for site, some in self.by_site(clients).items()
        }

    def ask(self, orders: Mapping[str, Order]) -> Iterator[Reply]:
        """Send orders to sites, and yield their replies; a new mask is sent to all sites first.

        A site that misses the mask is greeted with its next order.
        """
        greetings: dict[str, Order] = {}
        if is_new := self.mask != self._sent_mask:
            self._sent_mask = self.mask
            greetings = dict.fromkeys(sorted(set(self.site_of.values())), self._greeting())
        for reply in self.correspondence.ask({**greetings, **orders}, greet=is_new):
            if reply.site in orders:
                yield reply
            elif reply.answer is None:
                rank_zero_warn(f"site {reply.site} did not receive the new mask: {reply.reason}")

    def sums(
        self,
        what: str,
        asked: Mapping[int, int],
        read: Callable[[dict[str, Tensor], int], T],
        *,
        options: Mapping[str, Any] | None = None,
        values: Mapping[str, Tensor] | None = None,
        skips: bool = False,
    ) -> Iterator[T]:
        """Ask clients for sums over their training examples, and yield ``read`` of each client's sums, in order.

        Args:
            what: name of the sums: ``scores`` or ``head`` of a mask, or `STATISTICS`.
            asked: number of examples by client.
            read: gets a client's sums by name, and their number of examples; raises ValueError for sums that
                are not valid.
            options: numbers that clients need.
            values: parameters that clients use instead of the module's.
            skips: whether clients without valid sums are left out, with a warning; else they end the run.

        Raises:
            ConfigurationError: naming a client without valid sums, or if no client has sent any.
        """
        about = {"what": what, "num_clients": len(self.site_of), **(options or {})}
        replies = self.ask(self._calibration(about, asked, values or {}))
        num_read = 0
        for part in in_order(list(asked), (part for reply in replies for part in reply.parts)):
            try:
                found = read(*_sums_in(part, asked[part.client]))
            except ValueError as error:
                at = f"client {part.client} at site {self.site_of[part.client]}"
                if not skips:
                    raise ConfigurationError(f"calibration: {at}: {error}") from None
                rank_zero_warn(f"calibration, left out: {at}: {error}")
            else:
                num_read += 1
                yield found
        if asked and not num_read:
            raise ConfigurationError(f"calibration: no client sent sums for {what}")

    def _calibration(
        self, about: Mapping[str, Any], asked: Mapping[int, int], values: Mapping[str, Tensor]
    ) -> dict[str, Order]:
        """Return the orders that ask clients for sums over their examples, one per site, by site."""
        tensors = model_tensors(self._trainer.lightning_module, without=values.keys())
        tensors |= {f"{VALUES}{name}": value.detach().cpu() for name, value in values.items()}

        def content(some: tuple[int, ...]) -> Content:
            return {**about, "examples": [[client, asked[client]] for client in some]}, tensors

        return self.orders("calibrate", asked, content, self._trainer.current_epoch)


def _sums_in(part: Part, num_examples: int) -> tuple[dict[str, Tensor], int]:
    """Return a client's sums from its part of a reply, and the number of examples that they are over.

    Raises:
        ValueError: if there are none, or not of as many examples as asked.
    """
    if part.answer is None:
        raise ValueError(part.reason)
    if part.answer.num_examples != num_examples:
        raise ValueError(f"it read {part.answer.num_examples} examples instead of {num_examples}")
    return of_stage(SUMS, part.tensors), num_examples


class Counted(Stage):
    """Records the last round in which each client's update was used.

    Args:
        run: id of the run, 32 hexadecimal digits; a resumed run has that of its checkpoint.

    Attributes:
        run: id of the run.
        rounds: last round by client: that of its order, even if the update counted in a later one.
        began: round of the order, by client, of updates that count in a later round.
    """

    key = "sites"
    traits = NO_TRAITS

    def __init__(self, run: str) -> None:
        self.run = run
        self.rounds: dict[int, int] = {}
        self.began: Mapping[int, int] = {}

    def close(self, record: RoundRecord) -> None:
        """Record the clients whose updates were used."""
        absent = {*record.skipped, *record.lost}
        counting = (client for client in record.finished if client not in absent)
        self.rounds |= {client: self.began.get(client, self._number) for client in counting}

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Store the number of the round."""
        self._number = round_index

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run, and the last round in which each client's update was used."""
        return {"run": self.run, "rounds": dict(self.rounds)}

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Restore the id of the run, and each client's last round, from a checkpoint."""
        if state:
            self.run, self.rounds = state["run"], dict(state["rounds"])


STAGES = ("validation", "test")  # for which clients hold out examples


def _check_key(what: str, key: Any, digits: int) -> None:
    if key != "":
        check_hex(what, key, digits)


Examples = Annotated[int, partial(check_whole, most=10**9)]


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """Facts that a site reports to the server: its clients' numbers of examples, its options and its limits.

    Attributes:
        clients: number of examples of each client.
        held_out: number of examples that each client holds out, by stage of `STAGES` and client.
        batch_size: size of local batches.
        drop_last: True if a smaller last batch is left out.
        precision: precision of the Trainer.
        signing: public key that verifies the site's messages in secure sums, in hexadecimal digits; empty
            without one.
        sum_key: fingerprint of the key of encrypted sums, in hexadecimal digits; empty without one.
        most_bytes: largest size of an order, in bytes.
        largest: largest sub-network that clients train, as text; empty for no limit.

    Raises:
        MessageError: for values out of range.

    Example:
        >>> from fl_lightning.flower.documents import document_of
        >>> none = {"validation": {3: 0}, "test": {3: 0}}
        >>> facts = SiteFacts(
        ...     clients={3: 90}, held_out=none, batch_size=32, drop_last=False, precision="32-true",
        ...     signing="", sum_key="", most_bytes=1000, largest="",
        ... )
        >>> read_document(SiteFacts, document_of(facts)) == facts
        True
    """

    clients: Mapping[int, Examples]
    held_out: Mapping[str, Mapping[int, Examples]]
    batch_size: Positive
    drop_last: bool
    precision: str
    signing: Annotated[str, partial(_check_key, digits=64)]
    sum_key: Annotated[str, partial(_check_key, digits=16)]
    most_bytes: Positive
    largest: str

    def __post_init__(self) -> None:
        check_fields(self)
        if sorted(self.held_out) != sorted(STAGES):
            raise MessageError(
                f"held_out must be of {', '.join(STAGES)}, got {shown(self.held_out)}"
            )
        for stage, sizes in self.held_out.items():
            if sizes.keys() != self.clients.keys():
                raise MessageError(f"held_out: {stage} must have the same clients as clients")


def facts_of(answers: Mapping[str, Answer]) -> dict[str, SiteFacts]:
    """Read the facts that sites report about themselves from their answers, by site.

    Raises:
        ConfigurationError: naming a site whose facts are not valid.
    """
    found: dict[str, SiteFacts] = {}
    for site, answer in answers.items():
        try:
            found[site] = read_document(SiteFacts, dict(answer.options))
        except MessageError as error:
            raise ConfigurationError(
                f"site {site}: its facts about itself are not valid: {error}"
            ) from None
    return found
