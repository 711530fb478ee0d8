"""Server side of hidden sums over sites: secure sums and encrypted sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.plain_json import MessageError, shown
from fl_lightning.flower.documents import document_of
from fl_lightning.flower.messages import Answer, Order
from fl_lightning.flower.server.correspondence import Part
from fl_lightning.flower.server.remote_clients import ClientsAtSites, Content
from fl_lightning.flower.sums import (
    FEWEST,
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    TO_CLIENT,
    TOTAL,
    EncryptedStage,
    SecureStage,
)
from fl_lightning.secure.encryption.ciphertext_numbers import Sender
from fl_lightning.secure.encryption.ckks import CKKSServer, ciphertext_bytes
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.secure.protocol.server import SecureServer
from fl_lightning.secure.protocol.session import ProtocolStage, Session
from fl_lightning.secure.simulation import HiddenSum, no_cost, timed
from fl_lightning.server.protected import FEWEST_CLIENTS, ProtectionCost

# the server asks a site for as many ciphertexts at once as fit into an answer of this size, at least one
MOST_BYTES = 32 * 2**20
# called with a client whose vector is not in the sum, and the reason
Lost = Callable[[int, str], None]


def _parts(
    remote: ClientsAtSites, orders: Mapping[str, Order], cost: ProtectionCost
) -> Iterator[Part]:
    """Send an order to each site, yield each client's part of the replies, and add the bytes to the cost."""
    for reply in remote.ask(orders):
        for part in reply.parts:
            cost.bytes_up[part.client] += part.bytes_up
            cost.bytes_down[part.client] += part.bytes_down
            yield part


class SumOverSites:
    """Adds up clients' vectors by the secure-sum protocol over sites; the server learns only the sum.

    Args:
        remote: clients of the run.
        lost: called with each client whose vector is not in the sum; it may raise.
        keys: public signing keys of the sites that have one, by site.
        trained_on: returns the hash of the order that clients trained with, see `sums.trained_on`.
    """

    def __init__(
        self,
        remote: ClientsAtSites,
        lost: Lost,
        keys: Mapping[str, bytes],
        trained_on: Callable[[], str],
    ) -> None:
        self._remote, self._lost, self._keys = remote, lost, keys
        self._trained_on = trained_on

    def __call__(self, session: Session, clients: Sequence[int]) -> HiddenSum:
        """Run the protocol, one order per stage and site.

        Args:
            session: session of the protocol.
            clients: global ids in the order of their places in the session.

        Raises:
            AbortedError: if too few clients are left.
        """
        session, site_of = replace(session, purpose=self._trained_on()), self._remote.site_of
        agreed = SecureStage(0, session, tuple(clients), tuple(site_of[c] for c in clients))
        server, cost = SecureServer(session, agreed.directory(self._keys)), no_cost(clients)
        incoming: dict[int, bytes] = dict.fromkeys(range(session.num_clients), b"")
        for stage in session.stages:
            reasons: dict[int, str] = {}
            orders = self._orders(replace(agreed, stage=int(stage)), incoming)
            for part in _parts(self._remote, orders, cost):
                place = clients.index(part.client)
                reasons[place] = part.reason
                try:
                    if part.answer is not None:
                        with timed(cost, "server_seconds"):
                            server.receive(bytes_of(part.tensors.get(MESSAGE)), sender=place)
                except ValueError as error:  # no message, or not signed by the client
                    reasons[place] = str(error)
            for place in sorted(server.awaited):
                self._note_silent(clients[place], stage, reasons[place])
            with timed(cost, "server_seconds"):
                incoming = server.close_stage()
        return HiddenSum(server.total, frozenset(clients[p] for p in server.survivors), cost)

    def _orders(self, asked: SecureStage, incoming: Mapping[int, bytes]) -> dict[str, Order]:
        messages = {asked.clients[place]: incoming[place] for place in sorted(incoming)}

        def content(some: tuple[int, ...]) -> Content:
            told = {TO_CLIENT.format(c): as_tensor(messages[c]) for c in some if messages[c]}
            return document_of(asked), told

        return self._remote.orders("sum", messages, content, asked.session.round_index)

    def _note_silent(self, client: int, stage: ProtocolStage, reason: str) -> None:
        told = (
            f"at site {self._remote.site_of[client]}: it left the secure sum at stage {stage.name}: "
            f"{reason}"
        )
        if stage <= ProtocolStage.MASK:
            self._lost(client, told)
        else:  # its vector is in the sum
            rank_zero_warn(f"client {client} {told}")


class EncryptedOverSites:
    """Adds up clients' vectors that sites have encrypted; one of the sites decrypts the sum.

    Args:
        remote: clients of the run.
        lost: called with each client whose vector is not in the sum; it may raise.
    """

    def __init__(self, remote: ClientsAtSites, lost: Lost) -> None:
        self._remote, self._lost, self._key = remote, lost, b""

    def __call__(self, layout: CKKSLayout, clients: Sequence[int]) -> HiddenSum:
        """Add up the encrypted vectors of a round, and let one site decrypt the sum.

        Args:
            layout: layout of the round's vectors.
            clients: clients that have trained.

        Raises:
            RoundFailure: if too few vectors arrive, or the sum is not decrypted.
        """
        sites = sorted(self._remote.by_site(clients))
        # the same one if the round is added up again: sites encrypt for one opener only
        opener = sites[layout.round_index % len(sites)]
        agreed = EncryptedStage("key", opener, tuple(clients))
        cost = no_cost(clients)
        if not self._key:  # which the opener makes, and seals, if it has none
            made = self._asked_opener(agreed, layout.round_index, {}, cost)
            try:
                self._key = bytes_of(made.tensors.get(KEY))
            except ValueError as error:
                raise RoundFailure(
                    f"site {opener} did not make the encryption key of the run: {error}"
                ) from None
        total, senders = self._added(replace(agreed, stage="encrypt"), layout, cost)
        if total is None or len(senders) < FEWEST_CLIENTS:
            raise RoundFailure(
                f"round {layout.round_index + 1}: {len(senders)} vectors are left for the encrypted sum, which "
                f"needs {FEWEST_CLIENTS} or more: fewer could be read from it"
            )
        asked = replace(agreed, stage="open", senders=senders)
        told = {TOTAL: total.encode()}
        answer = self._asked_opener(asked, layout.round_index, told, cost)
        values = _values(answer.tensors.get(OPENED), layout, opener)
        return HiddenSum(values, frozenset(sender.client for sender in senders), cost)

    def _added(
        self, asked: EncryptedStage, layout: CKKSLayout, cost: ProtectionCost
    ) -> tuple[EncryptedUpdate | None, tuple[Sender, ...]]:
        """Return the sum of the encrypted vectors, and the clients whose vectors are in it; None if no vector came."""
        server = CKKSServer(layout)
        total: EncryptedUpdate | None = None
        senders: list[Sender] = []
        for orders in self._waves(asked, layout):
            for part in _parts(self._remote, orders, cost):
                try:
                    with timed(cost, "server_seconds"):
                        message, sender = _message_of(part, layout, len(asked.clients))
                        total = server.plus(total, message)
                except ValueError as error:
                    told = f"at site {part.reply.site}: it left the encrypted sum: {error}"
                    self._lost(part.client, told)
                else:
                    senders.append(sender)
        return total, tuple(senders)

    def _waves(self, asked: EncryptedStage, layout: CKKSLayout) -> Iterator[dict[str, Order]]:
        """Yield orders to encrypt vectors, by site, for so few clients at a time that no answer is too large."""
        size = layout.num_ciphertexts * ciphertext_bytes(layout.parameters)
        num_together = max(1, MOST_BYTES // max(1, size))
        left = {site: iter(c) for site, c in self._remote.by_site(asked.clients).items()}
        content = document_of(asked), {KEY: as_tensor(self._key)}
        while some := [c for clients in left.values() for c in islice(clients, num_together)]:
            yield self._remote.orders("sum", some, lambda _: content, layout.round_index)

    def _asked_opener(
        self,
        asked: EncryptedStage,
        round_index: int,
        tensors: Mapping[str, bytes],
        cost: ProtectionCost,
    ) -> Answer:
        """Send an order to the site that decrypts the sum, and return the answer; one of its clients bears the bytes.

        Raises:
            RoundFailure: if the opener does not answer.
        """
        opener, given = asked.opener, {KEY: self._key, **tensors} if self._key else tensors
        told = {name: as_tensor(data) for name, data in given.items()}
        order = self._remote.order("sum", (), (document_of(asked), told), round_index)
        [reply] = self._remote.ask({opener: order})
        first = self._remote.by_site(asked.clients)[opener][0]
        cost.bytes_up[first] += reply.bytes_up
        cost.bytes_down[first] += reply.bytes_down
        if reply.answer is None:
            is_key = asked.stage == "key"
            what = (
                "did not make the encryption key of the run"
                if is_key
                else "has not opened the encrypted sum"
            )
            raise RoundFailure(
                f"round {order.round + 1}: site {opener} {what}: {reply.reason}. Nobody else opens "
                "this round's sum: when the site is back, go on from last.ckpt (network run --resume last)"
            )
        return reply.answer


def _message_of(part: Part, layout: CKKSLayout, num_clients: int) -> tuple[EncryptedUpdate, Sender]:
    """Return a client's encrypted vector, and the facts about its sender that decrypting the sum needs.

    Args:
        part: the client's part of its site's reply.
        layout: layout of the round's vectors.
        num_clients: number of clients that have trained.

    Raises:
        ValueError: if the client has sent no valid vector.
    """
    if part.answer is None or part.reply.answer is None:
        raise ValueError(part.reason)
    message, nonce = (bytes_of(part.tensors.get(name)) for name in (MESSAGE, NONCE))
    fewest = part.reply.answer.options.get(FEWEST)
    if (
        type(fewest) is not int or fewest > num_clients
    ):  # no sum of the round would be opened with it
        raise ValueError(
            f"its site requires {shown(fewest)} clients in a sum, and {num_clients} have trained"
        )
    sent = layout.decoded(message)
    if sent.sender != part.client:
        raise MessageError(f"the message is of client {sent.sender}")
    return sent, Sender(part.client, nonce, fewest)


def _values(values: Tensor | None, layout: CKKSLayout, opener: str) -> Tensor:
    """Check that a decrypted sum is a vector of finite numbers of the right size, and return it.

    Raises:
        RoundFailure: if it is not a vector of finite numbers of the right size.
    """
    form = None if values is None else (values.dtype, values.shape)
    if values is None or form != (torch.float64, (layout.size,)) or not values.isfinite().all():
        raise RoundFailure(
            f"round {layout.round_index + 1}: site {opener} has not opened the encrypted sum: its answer does "
            f"not have {layout.size} finite numbers"
        )
    return values
