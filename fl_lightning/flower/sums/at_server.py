"""The server's half of hidden sums over sites; `adds_over_sites` chooses the scheme.

Secure sums: the server asks stage by stage, and learns the sum only. Encrypted sums: it adds ciphertexts that
it cannot read, and a site opens the sum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.plain_json import MessageError
from fl_lightning.flower.messages import CATEGORIES, Order
from fl_lightning.flower.server.correspondence import Correspondence, Reply
from fl_lightning.flower.sums.agreed import (
    FEWEST,
    FROM_CLIENT,
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    TO_CLIENT,
    TOTAL,
    Agreed,
    EncryptedAgreed,
)
from fl_lightning.secure.encryption.ciphertext_numbers import NONCE_SIZE, Sender
from fl_lightning.secure.encryption.ckks import CKKSServer, ciphertext_bytes
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import ProtocolStage, Session
from fl_lightning.secure.scheme import EncryptedSum, OpenedSum
from fl_lightning.secure.simulation import Costs, SumOutcome
from fl_lightning.server.protected import FEWEST_CLIENTS, ProtectionCost, SumsAtSites, SumsOverSites

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


# a site is asked for as many clients at once as fit into an answer of this size, and for one at least
MOST_BYTES = 32 * 2**20


class EncryptedOverSites:
    """Adds up vectors that clients have at their sites.

    Args:
        correspondence: with the sites.
        site_of: the site of each client.
        write: writes orders of the present round.
        lost: told whose vector will not be in the sum, and why; it may raise.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        site_of: Mapping[int, str],
        write: WritesOrders,
        lost: Callable[[int, str], None],
    ) -> None:
        self._correspondence, self._site_of = correspondence, site_of
        self._write, self._lost = write, lost
        self._key = b""

    def __call__(self, layout: CKKSLayout, clients: Sequence[int]) -> OpenedSum:
        """Add up a round's vectors, which sites encrypt, and let a site open the sum.

        Args:
            layout: of the round.
            clients: that have trained.

        Raises:
            RoundFailure: if too few are left, or the sum is not opened.
        """
        sites = sorted({self._site_of[client] for client in clients})
        # the same one if the round is added up again: sites encrypt for one opener only
        opener = sites[layout.round_index % len(sites)]
        run = self._write((), {}, {}).run
        agreed = EncryptedAgreed(
            run, layout.round_index, layout.size, layout.parameters.degree, opener, tuple(clients)
        )
        costs = _Costs(next(c for c in clients if self._site_of[c] == opener))
        if not self._key:
            self._key = self._new_key(agreed, costs)
        total, senders = self._added(agreed, layout, costs)
        if total is None or len(senders) < FEWEST_CLIENTS:
            raise RoundFailure(
                f"round {agreed.round}: {len(senders)} vectors are left for the encrypted sum, which would "
                f"show them: it needs {FEWEST_CLIENTS} or more"
            )
        reply = self._asked_opener(agreed, "open", senders, {TOTAL: total.encode()}, costs)
        in_sum = frozenset(sender.client for sender in senders)
        return OpenedSum(_values(reply, agreed), in_sum, costs.protection_cost)

    def _new_key(self, agreed: EncryptedAgreed, costs: _Costs) -> bytes:
        """Return the run's key, sealed, which the opener makes if it has none."""
        reply = self._asked_opener(agreed, "key", (), {}, costs)
        assert reply.answer is not None
        try:
            return bytes_of(reply.answer.tensors.get(KEY))
        except ValueError as error:
            raise RoundFailure(f"site {reply.site} made no key for the run: {error}") from None

    def _added(
        self, agreed: EncryptedAgreed, layout: CKKSLayout, costs: _Costs
    ) -> tuple[EncryptedUpdate | None, tuple[Sender, ...]]:
        """Return the sum of what sites encrypt, and who is in it."""
        server = CKKSServer(layout)
        total: EncryptedUpdate | None = None
        senders: list[Sender] = []
        for orders in self._waves(agreed, layout):
            for reply in self._correspondence.ask(orders):
                asked = orders[reply.site].clients
                for client in asked:
                    costs.up[client] += reply.bytes_up // len(asked)
                    costs.down[client] += reply.bytes_down // len(asked)
                    began = time.process_time()
                    try:
                        message, sender = _message_of(reply, client, layout)
                        total = server.plus(total, message)
                    except (ValueError, MessageError) as error:
                        self._lost(
                            client, f"at site {reply.site}: it left the encrypted sum: {error}"
                        )
                    else:
                        senders.append(sender)
                    costs.server_seconds += time.process_time() - began
        return total, tuple(senders)

    def _waves(self, agreed: EncryptedAgreed, layout: CKKSLayout) -> Iterator[dict[str, Order]]:
        """Yield orders to encrypt until all clients were asked."""
        size = layout.num_ciphertexts * ciphertext_bytes(layout.parameters)
        at_once = max(1, MOST_BYTES // max(1, size))
        left: dict[str, Iterator[int]] = {
            site: iter([c for c in agreed.clients if self._site_of[c] == site])
            for site in sorted({self._site_of[client] for client in agreed.clients})
        }
        options, key = agreed.options("encrypt"), {KEY: as_tensor(self._key)}
        while True:
            asked = {site: tuple(islice(clients, at_once)) for site, clients in left.items()}
            if not any(asked.values()):
                return
            yield {site: self._write(some, options, key) for site, some in asked.items() if some}

    def _asked_opener(
        self,
        agreed: EncryptedAgreed,
        stage: str,
        senders: tuple[Sender, ...],
        tensors: Mapping[str, bytes],
        costs: _Costs,
    ) -> Reply:
        """Return what the opener replies; its bytes are of its first client.

        Raises:
            RoundFailure: if it says nothing.
        """
        options = agreed.options("key" if stage == "key" else "open", senders)
        given = {KEY: self._key, **tensors} if self._key else tensors
        order = self._write((), options, {name: as_tensor(data) for name, data in given.items()})
        [reply] = self._correspondence.ask({agreed.opener: order})
        costs.up[costs.first] += reply.bytes_up
        costs.down[costs.first] += reply.bytes_down
        if reply.answer is None:
            what = (
                "made no key for the run" if stage == "key" else "has not opened the encrypted sum"
            )
            raise RoundFailure(
                f"round {agreed.round}: site {agreed.opener} {what}: {reply.reason}. Nobody else opens "
                "this round's sum: when the site is back, go on from last.ckpt (network run --resume last)"
            )
        return reply


class _Costs:
    """Costs of a sum, added up while it runs.

    Args:
        first: client that the opener's own messages count for.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.up: Counter[int] = Counter()
        self.down: Counter[int] = Counter()
        self.server_seconds = 0.0

    @property
    def protection_cost(self) -> ProtectionCost:
        """All of it; of their own CPU time sites do not tell."""
        return ProtectionCost(self.up, self.down, {"server_seconds": self.server_seconds})


def _message_of(reply: Reply, client: int, layout: CKKSLayout) -> tuple[EncryptedUpdate, Sender]:
    """Return a client's message and who it is of.

    Raises:
        ValueError: if it has sent none.
        MessageError: if it is none.
    """
    if reply.answer is None:
        raise ValueError(reply.reason)
    failures = {a.client: a.failure for a in reply.answer.clients if a.failure is not None}
    if client in failures:
        raise ValueError(CATEGORIES[failures[client]])
    tensors, fewest = reply.answer.tensors, reply.answer.options.get(FEWEST)
    message, nonce = (bytes_of(tensors.get(f"{client}/{name}")) for name in (MESSAGE, NONCE))
    if type(fewest) is not int or len(nonce) != NONCE_SIZE:
        raise ValueError("its site's answer does not say who it is of")
    sent = layout.decoded(message)
    if sent.sender != client:
        raise MessageError(f"the message is of client {sent.sender}")
    return sent, Sender(client, nonce, fewest)


def _values(reply: Reply, agreed: EncryptedAgreed) -> Tensor:
    """Return the opened sum.

    Raises:
        RoundFailure: if these are not numbers of the model.
    """
    assert reply.answer is not None
    values = reply.answer.tensors.get(OPENED)
    is_sum = values is not None and values.dtype == torch.float64
    if (
        values is None
        or not is_sum
        or values.shape != (agreed.size,)
        or not values.isfinite().all()
    ):
        raise RoundFailure(
            f"round {agreed.round}: site {agreed.opener} has not opened the encrypted sum: its answer has "
            f"not {agreed.size} finite numbers"
        )
    return values


def adds_over_sites(
    sums: SumsOverSites,
    correspondence: Correspondence,
    site_of: Mapping[int, str],
    keys: Mapping[str, bytes],
    write: WritesOrders,
    lost: Callable[[int, str], None],
    trained_on: Callable[[], str],
) -> SumsAtSites:
    """Return what adds up vectors at sites.

    Args:
        sums: what the aggregator says of them.
        correspondence: with the sites.
        site_of: the site of each client.
        keys: public signing keys by site, of those that have one.
        write: writes orders of the present round.
        lost: told whose vector will not be in the sum, and why; it may raise.
        trained_on: what clients of the present round have trained on, see `agreed.trained_on`.
    """
    if isinstance(sums.agreed_sum, EncryptedSum):
        return EncryptedOverSites(correspondence, site_of, write, lost)
    return SumOverSites(correspondence, site_of, keys, write, lost, trained_on)
