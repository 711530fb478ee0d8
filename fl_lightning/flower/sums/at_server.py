"""The server's half of a secure sum over sites: it asks stage by stage, and learns the sum only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.flower.messages import CATEGORIES, Order
from fl_lightning.flower.server.correspondence import Correspondence, Reply
from fl_lightning.flower.sums.agreed import FROM_CLIENT, TO_CLIENT, Agreed
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import ProtocolStage, Session
from fl_lightning.secure.simulation import Costs, SumOutcome

# Writes an order of the present round: clients, options, tensors
WritesOrders = Callable[[tuple[int, ...], Mapping[str, Any], Mapping[str, Tensor]], Order]
_NOTHING = "it said nothing"


class SumOverSites:
    """Adds up vectors that clients have at their sites.

    Args:
        correspondence: with the sites.
        site_of: the site of each client.
        keys: public signing keys by site, of those that have one.
        write: writes orders of the present round.
        lost: told whose vector will not be in the sum, and why; it may raise.
        trained_on: what clients of the present round have trained on, see `agreed.trained_on`.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        site_of: Mapping[int, str],
        keys: Mapping[str, bytes],
        write: WritesOrders,
        lost: Callable[[int, str], None],
        trained_on: Callable[[], str],
    ) -> None:
        self._correspondence, self._site_of, self._keys = correspondence, site_of, keys
        self._write, self._lost, self._trained_on = write, lost, trained_on

    def __call__(self, session: Session, clients: Sequence[int]) -> SumOutcome:
        """Run the protocol.

        Args:
            session: of the protocol.
            clients: in the order of their places.

        Raises:
            AbortedError: if too few clients are left.
        """
        session = replace(session, purpose=self._trained_on())
        agreed = Agreed(session, tuple(clients), tuple(self._site_of[c] for c in clients))
        server = SecureServer(session, agreed.directory(self._keys))
        places = range(session.num_clients)
        costs = Costs(dict.fromkeys(places, 0), dict.fromkeys(places, 0))
        incoming: dict[int, bytes] = dict.fromkeys(places, b"")
        for stage in session.stages:
            reasons = self._ask(agreed, stage, incoming, server, costs)
            for place in sorted(server.awaited):
                self._note_silent(clients[place], stage, reasons.get(place, _NOTHING))
            began = time.process_time()
            incoming = server.close_stage()
            costs.server_seconds += time.process_time() - began
        return SumOutcome(server.total, server.survivors, costs)

    def _ask(
        self,
        agreed: Agreed,
        stage: ProtocolStage,
        incoming: Mapping[int, bytes],
        server: SecureServer,
        costs: Costs,
    ) -> dict[int, str]:
        """Ask at a stage; return why clients are silent, by place."""
        reasons: dict[int, str] = {}
        orders = self._orders(agreed, stage, incoming)
        for reply in self._correspondence.ask(orders):
            asked = orders[reply.site].clients
            said, failures = _said(reply), _failures(reply)
            for client in asked:
                place = agreed.place(client)
                costs.bytes_up[place] += reply.bytes_up // len(asked)
                costs.bytes_down[place] += reply.bytes_down // len(asked)
                if client not in said:
                    reasons[place] = reply.reason or failures.get(client, _NOTHING)
                    continue
                began = time.process_time()
                try:
                    server.receive(bytes_of(said[client]), sender=place)
                except ValueError as error:  # no message, or not signed by the client
                    reasons[place] = str(error)
                costs.server_seconds += time.process_time() - began
        return reasons

    def _orders(
        self, agreed: Agreed, stage: ProtocolStage, incoming: Mapping[int, bytes]
    ) -> dict[str, Order]:
        by_site: dict[str, list[int]] = {}
        for place in sorted(incoming):
            by_site.setdefault(agreed.sites[place], []).append(place)
        options = agreed.options(stage)
        return {
            site: self._write(
                tuple(agreed.clients[place] for place in places),
                options,
                {
                    TO_CLIENT.format(agreed.clients[place]): as_tensor(incoming[place])
                    for place in places
                    if incoming[place]
                },
            )
            for site, places in by_site.items()
        }

    def _note_silent(self, client: int, stage: ProtocolStage, reason: str) -> None:
        told = f"at site {self._site_of[client]}: it left the secure sum at stage {stage.name}: {reason}"
        if stage <= ProtocolStage.MASK:
            self._lost(client, told)
        else:  # its vector is in the sum
            rank_zero_warn(f"client {client} {told}")


def _failures(reply: Reply) -> dict[int, str]:
    """Return why clients of a site say nothing, by client."""
    answers = () if reply.answer is None else reply.answer.clients
    return {a.client: CATEGORIES[a.failure] for a in answers if a.failure is not None}


def _said(reply: Reply) -> dict[int, Tensor]:
    """Return what clients of a site have said, by client."""
    if reply.answer is None:
        return {}
    tensors = reply.answer.tensors
    return {
        answer.client: tensors[f"{answer.client}/{FROM_CLIENT}"]
        for answer in reply.answer.clients
        if f"{answer.client}/{FROM_CLIENT}" in tensors
    }
