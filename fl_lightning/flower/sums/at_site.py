"""A site's half of hidden sums: its clients' vectors stay here, messages of the scheme leave.

Secure sums: each stage is an order, with the server's message to every client that is asked, and an answer, with
every client's own. A site that is killed between two stages has lost its clients' keys: they are silent
from there on, which the protocol allows for. Secrets come from the operating system.

Encrypted sums: a site encrypts its clients' vectors, and opens the sum if it is the opener. It opens what adds up to the messages of named clients, enough of them for every site that takes part, and
for a round the sum of the same clients only. Messages name who is to open them, and a site's are for one
opener in a round: two sites cannot be had to open two sums, whose difference would be one client's vector.
Nor do clients go into a sum together that were given different models or options to train from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.plain_json import MessageError
from fl_lightning.flower.failures import OrderRefused
from fl_lightning.flower.messages import ClientAnswer, Order
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.site.desk import Done
from fl_lightning.flower.sums.agreed import (
    FEWEST,
    FROM_CLIENT,
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    SCHEME,
    TO_CLIENT,
    TOTAL,
    TRAINED_ON,
    Agreed,
    EncryptedAgreed,
    is_encrypted,
    session_by,
    trained_on,
)
from fl_lightning.flower.sums.keys import SumKey
from fl_lightning.flower.sums.site_vectors import SiteVectors, write_whole
from fl_lightning.secure.encryption.ciphertext_numbers import Sender
from fl_lightning.secure.encryption.ckks import CKKSClient
from fl_lightning.secure.encryption.encrypted_update import EncryptedUpdate
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
        """Prepare vectors for the sum of a round, by the rules of the configuration.

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


_NOTHING_TOLD = {"round": -1, "opener": "", "opened_round": -1, "opened": []}


class EncryptedSiteSums:
    """Takes part in the encrypted sums of one run.

    Args:
        folder: of the run at this site.
        policy: says how few clients a sum may have, and has the key.
        kept: the vectors of this site's clients.
    """

    def __init__(self, folder: Path, policy: Policy, kept: SiteVectors) -> None:
        self._policy, self._kept = policy, kept
        self._key_file, self._told_file = folder / "sealed.key", folder / "encrypted.json"
        self._told: dict[str, Any] = dict(_NOTHING_TOLD)
        if self._told_file.exists():
            self._told = json.loads(self._told_file.read_text())

    def follow(self, order: Order) -> Done:
        """Return what is asked for at a stage.

        Raises:
            OrderRefused: if the order is of another round, or would have this site tell too much.
            Refused: if the sum is over fewer clients than the site's policy wants.
        """
        try:
            agreed, stage, senders = EncryptedAgreed.of_options(order.options)
        except ValueError as error:
            raise OrderRefused("message", f"the sum: {error}") from None
        if (agreed.run, agreed.round) != (order.run, order.round):
            raise OrderRefused("sum", f"the sum is of {agreed.round} of run {agreed.run}")
        if self._policy.sum_key is None:
            raise OrderRefused("policy", "the sum is encrypted, and site.yaml has no sum_key")
        key = SumKey(self._policy.sum_key)
        if stage == "key":
            return Done(tensors={KEY: as_tensor(self._sealed(key, agreed))})
        try:
            sealed = bytes_of(order.tensors.get(KEY))
            layout = agreed.layout(sealed, self._trained_on(agreed))
            client = CKKSClient(layout, key.run_key(sealed, order.run, agreed.parameters))
            if stage == "encrypt":
                return self._encrypted(client, agreed, order.clients)
            total = layout.decoded(bytes_of(order.tensors.get(TOTAL)))
            return self._opened(client, agreed, senders, total)
        except Refused:
            raise
        except (ValueError, KeyError, MessageError) as error:
            raise OrderRefused("sum", f"the sum: {error!r}") from None

    def _trained_on(self, agreed: EncryptedAgreed) -> str:
        """Return what this site's clients have trained on in the round.

        Raises:
            OrderRefused: if they have not, or by another configuration.
        """
        rules = dict(self._kept.rules)
        if agreed.round != self._kept.round:
            raise OrderRefused("sum", f"there are vectors of round {self._kept.round} here")
        given = str(rules.pop(TRAINED_ON, ""))
        if rules != {"scheme": SCHEME, "degree": agreed.degree}:
            raise OrderRefused("sum", f"{agreed} is not what the configuration says: {rules}")
        return given

    def _sealed(self, key: SumKey, agreed: EncryptedAgreed) -> bytes:
        """Return the run's key, which is made once at a site."""
        if self._key_file.exists():
            sealed = self._key_file.read_bytes()
            try:
                key.run_key(sealed, agreed.run, agreed.parameters)
            except ValueError:
                log.warning(
                    "the key in %s is of other parameters: there is a new one", self._key_file
                )
            else:
                return sealed
        sealed = key.new_run_key(agreed.run, agreed.parameters)
        write_whole(self._key_file, sealed)
        return sealed

    def _encrypted(self, client: CKKSClient, agreed: EncryptedAgreed, asked: Sequence[int]) -> Done:
        kept, policy = self._kept, self._policy
        policy.check_secure_sum(len(agreed.clients))
        self._note_opener(agreed)
        answers: list[ClientAnswer] = []
        tensors: dict[str, Tensor] = {}
        for one in asked:
            try:
                values = torch.from_numpy(kept.vectors[one])
                sent, sender = client.encrypt(values, one, policy.fewest_in_secure_sum)
            except (ValueError, KeyError) as error:
                log.warning("encrypted sum, client %d: %s", one, error)
                answers.append(ClientAnswer(client=one, failure="sum"))
            else:
                answers.append(ClientAnswer(client=one))
                tensors[f"{one}/{MESSAGE}"] = as_tensor(sent.encode())
                tensors[f"{one}/{NONCE}"] = as_tensor(sender.nonce)
        return Done(answers, tensors, options={FEWEST: policy.fewest_in_secure_sum})

    def _opened(
        self,
        client: CKKSClient,
        agreed: EncryptedAgreed,
        senders: Sequence[Sender],
        total: EncryptedUpdate,
    ) -> Done:
        if agreed.opener != self._policy.name:
            raise OrderRefused("sum", f"{agreed.opener} is to open this sum")
        self._policy.check_secure_sum(len(senders))
        if len(senders) < (fewest := max(each.fewest for each in senders)):
            raise OrderRefused(
                "policy", f"a site wants {fewest} clients in a sum, and it is of {len(senders)}"
            )
        values = client.open(total, senders)
        self._note_opened(agreed.round, sorted(each.client for each in senders))
        return Done(tensors={OPENED: values})

    def _note_opener(self, agreed: EncryptedAgreed) -> None:
        """Note for whom this site encrypts in a round, before anything leaves.

        Raises:
            OrderRefused: if it has encrypted for somebody else.
        """
        told = self._told
        if told["round"] == agreed.round and told["opener"] != agreed.opener:
            raise OrderRefused(
                "sum", f"round {agreed.round} was encrypted for {told['opener']} to open it"
            )
        self._told |= {"round": agreed.round, "opener": agreed.opener}
        write_whole(self._told_file, json.dumps(self._told).encode())

    def _note_opened(self, round_index: int, clients: list[int]) -> None:
        """Note whose sum is opened, before it leaves.

        Raises:
            OrderRefused: if this site has opened another one of this round, or has gone on.
        """
        before = (self._told["opened_round"], self._told["opened"])
        if round_index < before[0] or (round_index == before[0] and clients != before[1]):
            raise OrderRefused(
                "sum",
                f"this site has opened the sum of {before[1]} in round {before[0]}, and is asked for "
                f"{clients} in {round_index}",
            )
        self._told |= {"opened_round": round_index, "opened": clients}
        write_whole(self._told_file, json.dumps(self._told).encode())
