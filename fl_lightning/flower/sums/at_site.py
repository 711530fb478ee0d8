"""A site's half of a secure sum: its clients' vectors stay here, messages of the protocol leave.

Each stage is an order, with the server's message to every client that is asked, and an answer, with
every client's own. A site that is killed between two stages has lost its clients' keys: they are silent
from there on, which the protocol allows for. Secrets come from the operating system.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.flower.failures import OrderRefused
from fl_lightning.flower.messages import ClientAnswer, Order
from fl_lightning.flower.policy import Policy
from fl_lightning.flower.site.desk import Done
from fl_lightning.flower.sums.agreed import (
    FROM_CLIENT,
    TO_CLIENT,
    TRAINED_ON,
    Agreed,
    session_by,
    trained_on,
)
from fl_lightning.flower.sums.encrypted_agreed import is_encrypted
from fl_lightning.flower.sums.encrypted_at_site import EncryptedSiteSums
from fl_lightning.flower.sums.site_vectors import SiteVectors
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.keys import SigningKey
from fl_lightning.secure.protocol.messages import RevealRequest, decode
from fl_lightning.secure.protocol.session import ProtocolStage
from fl_lightning.secure.ring import RingIntegers

log = logging.getLogger(__name__)


class SiteSums:
    """Takes part in the secure sums of one run.

    Args:
        folder: of the run at this site.
        policy: says how few clients a sum may have, and whom this site knows.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._policy, self._kept = policy, SiteVectors(folder)
        self._encrypted = EncryptedSiteSums(folder, policy, self._kept)
        self._agreed: Agreed | None = None
        self._clients: dict[int, SecureClient] = {}

    def keep(
        self,
        vectors: Mapping[int, RingIntegers],
        rules: Mapping[str, Any],
        order: Order,
    ) -> None:
        """Have vectors ready for the sum of a round, by the rules of the configuration.

        Args:
            vectors: by client.
            rules: of the configuration.
            order: that clients have trained on.
        """
        if vectors:
            self._kept.keep(order.round, vectors, {**rules, TRAINED_ON: trained_on(order)})

    def follow(self, order: Order) -> Done:
        """Return what the clients that are asked say at a stage; some may say nothing.

        Raises:
            OrderRefused: if the order is of another round, or of a sum that this site takes no part in.
        """
        if is_encrypted(order.options):
            return self._encrypted.follow(order)
        try:
            agreed, stage = Agreed.of_options(order.options)
        except ValueError as error:
            raise OrderRefused("message", f"the sum: {error}") from None
        if stage == ProtocolStage.ADVERTISE:
            self._begin(agreed, order)
        elif agreed != self._agreed:
            raise OrderRefused("sum", "this site takes no part in this sum, or was started again")
        answers: list[ClientAnswer] = []
        tensors: dict[str, Tensor] = {}
        for client in order.clients:
            try:
                message = self._answer(client, stage, order)
            except (ValueError, KeyError, OrderRefused) as error:
                log.warning("secure sum, %s, client %d: %s", stage.name, client, error)
                self._clients.pop(client, None)
                answers.append(ClientAnswer(client=client, failure="sum"))
            else:
                answers.append(ClientAnswer(client=client))
                tensors[f"{client}/{FROM_CLIENT}"] = as_tensor(message)
        self._kept.note_used()
        return Done(answers, tensors)

    def _begin(self, agreed: Agreed, order: Order) -> None:
        session, policy, kept = agreed.session, self._policy, self._kept
        if session.round_index != order.round or order.round != kept.round:
            raise OrderRefused("sum", f"there are vectors of round {kept.round} here")
        try:
            is_agreed = session_by(kept.rules, session) == session
        except (ValueError, KeyError):  # KeyError: of another scheme
            is_agreed = False
        if not is_agreed:
            raise OrderRefused(
                "sum", f"{session} is not what the configuration says, and what was trained on"
            )
        policy.check_secure_sum(session.least_survivors)
        if policy.most_epsilon is not None and not session.active:
            raise OrderRefused(
                "policy",
                "site.yaml has most_epsilon, and a server that breaks the rules of this sum reads single "
                "vectors, which have a share of the noise only: SecureMean needs active: true",
            )
        if session.active and policy.signing_key is None:
            raise OrderRefused("policy", "the sum is signed, and site.yaml has no signing_key")
        if session.active and (unknown := sorted(set(agreed.sites) - policy.peers.keys())):
            raise OrderRefused("policy", f"the sum is with sites that peers do not have: {unknown}")
        kept.begin(agreed.clients, order.clients)
        key = None if policy.signing_key is None else SigningKey(policy.signing_key.read_bytes())
        directory = agreed.directory({s: bytes.fromhex(k) for s, k in policy.peers.items()})
        self._agreed = agreed
        try:
            self._clients = {
                client: SecureClient(
                    session,
                    agreed.place(client),
                    kept.vectors[client],
                    used=kept.used[client],
                    signing_key=key,
                    directory=directory,
                )
                for client in order.clients
                if client in kept.vectors
            }
        except ValueError as error:
            raise OrderRefused("sum", f"the sum: {error}") from None

    def _answer(self, client: int, stage: ProtocolStage, order: Order) -> bytes:
        secure = self._clients[client]
        if stage == ProtocolStage.ADVERTISE:
            return secure.advertise()
        message = bytes_of(order.tensors.get(TO_CLIENT.format(client)))
        if stage == ProtocolStage.REVEAL:
            assert self._agreed is not None
            agreed = self._agreed
            _, request = decode(agreed.session, message, RevealRequest)
            self._kept.open(client, (agreed.clients[at] for at in request.survivors))
        return secure.receive(message)
