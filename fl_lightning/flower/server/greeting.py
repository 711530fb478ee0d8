"""Orders of a run, first of all the greeting (``hello``), and the facts that a site reports in answer to it.

The greeting has the configuration of the run and the current mask. Every order has the last round in which each
client counted, so that sites know which client state is valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, check_hex, check_whole, shown
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import RoundRecord, Stage
from fl_lightning.flower.documents import Positive, check_fields, read_document
from fl_lightning.flower.messages import Answer, Kind, Order
from fl_lightning.flower.packing import RunMask, mask_tensors, model_tensors
from fl_lightning.flower.server.correspondence import Correspondence

Content = tuple[Mapping[str, Any], Mapping[str, Tensor]]  # options and tensors of an order


class Greeting:
    """Makes the orders of a run.

    A greeting with a mask has the whole model: training may have changed entries that are frozen now, and
    later orders leave them out.

    Args:
        configuration: configuration of the run, as YAML.
        counted: knows the id of the run, and in which rounds clients counted.
        trainer: Trainer of the server.
        mask: returns the current mask of the run; None if there is none.

    Attributes:
        digest: SHA-256 of the configuration.
        counted: as given.
        mask: as given.
    """

    def __init__(
        self,
        configuration: str,
        counted: Counted,
        trainer: Trainer,
        mask: Callable[[], RunMask | None],
    ) -> None:
        self.digest = hashlib.sha256(configuration.encode()).hexdigest()
        self.counted, self.mask = counted, mask
        self._configuration, self._trainer = configuration, trainer

    def order(self) -> Order:
        """Return the greeting, with the current mask and model if there is a mask."""
        options: dict[str, Any] = {"configuration": self._configuration}
        tensors: dict[str, Tensor] = {}
        if (mask := self.mask()) is not None:
            more, tensors = mask_tensors(mask)
            options |= more
            options["num_clients"] = len(self._trainer.datamodule.clients)  # type: ignore[attr-defined]
            tensors |= model_tensors(self._trainer.lightning_module)
        order = self.write("hello", (), options, tensors, self._trainer.current_epoch)
        return replace(order, counted=self.counted.rounds)

    def write(
        self,
        kind: Kind,
        clients: tuple[int, ...],
        options: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        round_index: int,
    ) -> Order:
        """Return an order of the run."""
        rounds = self.counted.rounds
        return Order(
            kind=kind,
            run=self.counted.run,
            configuration=self.digest,
            round=round_index,
            clients=clients,
            counted={client: rounds.get(client, -1) for client in clients},
            options=options,
            tensors=tensors,
        )


@dataclass(frozen=True)
class ClientsAtSites:
    """The clients of a run, who are asked at their sites.

    Attributes:
        correspondence: exchange of messages with the sites.
        greeting: makes the orders.
        site_of: name of the site of each client.
    """

    correspondence: Correspondence
    greeting: Greeting
    site_of: Mapping[int, str]

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
        """Return one order for each site that has some of the clients, by site.

        Args:
            kind: kind of the orders.
            clients: ids of the clients.
            content: returns options and tensors for some clients, those of one site.
            round_index: number of the round.
        """
        return {
            site: self.greeting.write(kind, some, *content(some), round_index)
            for site, some in self.by_site(clients).items()
        }


class Counted(Stage):
    """Records the last round in which the update of each client counted.

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
        """Return the id of the run, and the last round in which each client counted."""
        return {"run": self.run, "rounds": dict(self.rounds)}

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Restore the id of the run and the rounds from a checkpoint."""
        if state:
            self.run, self.rounds = state["run"], dict(state["rounds"])


STAGES = ("validation", "test")  # for which clients hold out examples


def _check_key(what: str, key: Any, digits: int) -> None:
    if key != "":
        check_hex(what, key, digits)


Examples = Annotated[int, partial(check_whole, most=10**9)]


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """Facts that a site reports about itself.

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

    Raises:
        MessageError: for values out of range.

    Example:
        >>> from fl_lightning.flower.documents import document_of
        >>> none = {"validation": {3: 0}, "test": {3: 0}}
        >>> facts = SiteFacts(
        ...     clients={3: 90}, held_out=none, batch_size=32, drop_last=False, precision="32-true",
        ...     signing="", sum_key="", most_bytes=1000,
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

    def __post_init__(self) -> None:
        check_fields(self)
        if sorted(self.held_out) != sorted(STAGES):
            raise MessageError(
                f"held_out must be of {', '.join(STAGES)}, got {shown(self.held_out)}"
            )
        for stage, sizes in self.held_out.items():
            if sizes.keys() != self.clients.keys():
                raise MessageError(f"held_out: {stage} is of other clients")


def facts_of(answers: Mapping[str, Answer]) -> dict[str, SiteFacts]:
    """Read the facts in the answers of sites, by site.

    Raises:
        ConfigurationError: naming a site whose facts are not valid.
    """
    found: dict[str, SiteFacts] = {}
    for site, answer in answers.items():
        try:
            found[site] = read_document(SiteFacts, dict(answer.options))
        except MessageError as error:
            raise ConfigurationError(f"site {site}: what it says of itself: {error}") from None
    return found
