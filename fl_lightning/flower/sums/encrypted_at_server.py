"""The server's half of an encrypted sum over sites: it adds what it cannot read, and has it opened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.plain_json import MessageError
from fl_lightning.flower.messages import CATEGORIES, Order
from fl_lightning.flower.server.correspondence import Correspondence, Reply
from fl_lightning.flower.sums.at_server import WritesOrders
from fl_lightning.flower.sums.encrypted_agreed import (
    FEWEST,
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    TOTAL,
    EncryptedAgreed,
)
from fl_lightning.secure.encryption.ciphertext_numbers import NONCE_SIZE, Sender
from fl_lightning.secure.encryption.ckks import CKKSServer, ciphertext_bytes
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.secure.scheme import OpenedSum
from fl_lightning.server.protected import FEWEST_CLIENTS, ProtectionCost

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
        """Have a round's vectors encrypted, add them up, and have the sum opened.

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
                        message, sender = _said(reply, client, layout)
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
    """What a sum costs, while it grows.

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


def _said(reply: Reply, client: int, layout: CKKSLayout) -> tuple[EncryptedUpdate, Sender]:
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
