"""Site side of hidden sums: the clients' vectors stay here, and messages of the protocol leave.

Secure sums: the order of a stage has the server's message to every client, and the answer has the clients' own
messages. A site that is killed between two stages has lost the keys of its clients: they drop out, which the
protocol allows for. Secrets come from the operating system.

Encrypted sums: a site encrypts its clients' vectors, and decrypts the sum if it is the opener. It decrypts only
the sum of the messages of named clients, which must be enough for every site that takes part.

A server that is killed begins the sum of a round again. It learns only one sum per round: two sums over different
clients would differ by the vectors of a few. A client that has helped to open the sum of some survivors helps
with no other sum of that round; more than half of a cohort must help, so two disjoint halves cannot open two.
The encrypted messages of a site are for one opener per round, which decrypts one sum. Clients that were given
different models or options to train with cannot be in one sum.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.flower.messages import ClientAnswer, Order, OrderRefused
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.site.ledger import whole_file
from fl_lightning.flower.site.order_queue import OrderResult
from fl_lightning.flower.sums import (
    FEWEST,
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    TO_CLIENT,
    TOTAL,
    TRAINED_ON,
    EncryptedStage,
    SecureStage,
    SumKey,
    session_by,
    stage_of,
    trained_on,
)
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters
from fl_lightning.secure.encryption.ckks import CKKSClient
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout
from fl_lightning.secure.protocol.client import SecureClient
from fl_lightning.secure.protocol.messages import RevealRequest, decode
from fl_lightning.secure.protocol.session import ProtocolStage
from fl_lightning.secure.ring import RingIntegers

log = logging.getLogger(__name__)
MOST_OPENINGS = 16  # of a round's encrypted sum, which a killed server adds up again


class SiteSums:
    """Takes part in the secure or encrypted sums of one run, on behalf of a site's clients.

    Args:
        folder: folder of the run at this site.
        policy: smallest number of clients in a sum, known sites, keys.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._policy, self._kept = policy, SiteVectors(folder)
        self._key_file = folder / "sealed.key"
        self._agreed: SecureStage | None = None
        self._clients: dict[int, SecureClient] = {}

    def keep(
        self,
        vectors: Mapping[int, RingIntegers],
        rules: Mapping[str, Any],
        order: Order,
    ) -> None:
        """Write to disk the vectors that this site's clients add to a round's sum.

        Args:
            vectors: vectors by client.
            rules: options of the sum by the configuration, see `rules_of`.
            order: order that the clients have trained with.
        """
        if vectors:
            self._kept.keep(order.round, vectors, {**rules, TRAINED_ON: trained_on(order)})

    def follow(self, order: Order) -> OrderResult:
        """Return the clients' answers to an order for one stage of a secure or encrypted sum; some clients may fail.

        Raises:
            OrderRefused: if the order is of another round, of a sum without this site, or would make the
                site reveal too much.
            Refused: if the sum is over fewer clients than the site's policy wants.
        """
        try:
            asked = stage_of(order)
        except ValueError as error:
            raise OrderRefused("message", f"the sum: {error}") from None
        if isinstance(asked, SecureStage):
            return self._secure(order, asked)
        try:
            return self._encrypted(order, asked)
        except Refused:
            raise
        except (ValueError, KeyError) as error:
            raise OrderRefused("sum", f"the sum: {error!r}") from None

    def _secure(self, order: Order, asked: SecureStage) -> OrderResult:
        stage = ProtocolStage(asked.stage)
        if stage == ProtocolStage.ADVERTISE:
            self._begin(asked, order)
        elif replace(asked, stage=0) != self._agreed:
            raise OrderRefused("sum", "this site did not begin this sum, or was restarted since")

        def say(client: int) -> dict[str, Tensor]:
            secure = self._clients.pop(client)  # back again unless it refuses
            if stage == ProtocolStage.ADVERTISE:
                said = secure.advertise()
            else:
                message = bytes_of(order.tensors.get(TO_CLIENT.format(client)))
                if stage == ProtocolStage.REVEAL:
                    _, request = decode(asked.session, message, RevealRequest)
                    survivors = (asked.clients[at] for at in request.survivors)
                    self._kept.open(f"client {client}", survivors)
                said = secure.receive(message)
            self._clients[client] = secure
            return {MESSAGE: as_tensor(said)}

        done = _of_each(order, say)
        self._kept.save()
        return done

    def _begin(self, agreed: SecureStage, order: Order) -> None:
        session, policy, kept = agreed.session, self._policy, self._kept
        if session.round_index != order.round or order.round != kept.round:
            raise OrderRefused("sum", f"there are vectors of round {kept.round} here")
        try:
            is_agreed = session_by(kept.rules, session) == session
        except (ValueError, KeyError):  # KeyError: of another scheme
            is_agreed = False
        if not is_agreed:
            raise OrderRefused(
                "sum", f"{session} does not follow from the configuration and the order to train"
            )
        policy.check_secure_sum(session.least_survivors)
        if policy.most_epsilon is not None and not session.active:
            raise OrderRefused(
                "policy",
                "site.yaml has most_epsilon, and a server that breaks the rules of this sum could read single "
                "vectors, which have only a share of the noise: set active: true of SecureMean",
            )
        if session.active and policy.signing_key is None:
            raise OrderRefused("policy", "the sum is signed, and site.yaml has no signing_key")
        if session.active and (unknown := sorted(set(agreed.sites) - policy.peers.keys())):
            raise OrderRefused("policy", f"peers of site.yaml have no key of the sites {unknown}")
        kept.begin(list(agreed.clients), "began with a sum of {}")
        key = policy.private_key
        directory = agreed.directory({s: bytes.fromhex(k) for s, k in policy.peers.items()})
        self._agreed = agreed
        try:
            self._clients = {
                client: SecureClient(
                    session,
                    agreed.clients.index(client),
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

    def _encrypted(self, order: Order, asked: EncryptedStage) -> OrderResult:
        kept, policy, rules = self._kept, self._policy, dict(self._kept.rules)
        if policy.sum_key is None:
            raise OrderRefused("policy", "the sum is encrypted, and site.yaml has no sum_key")
        if order.round != kept.round:
            raise OrderRefused("sum", f"there are vectors of round {kept.round} here")
        trained = rules.pop(TRAINED_ON)
        if rules.pop("scheme", "") != "ckks":
            raise OrderRefused("sum", f"the configuration has no encrypted sum, but {rules}")
        key, parameters = SumKey(policy.sum_key), CKKSParameters(**rules)
        if asked.stage == "key":
            return OrderResult(tensors={KEY: as_tensor(self._sealed(key, order.run, parameters))})
        sealed = bytes_of(order.tensors.get(KEY))
        # messages are for this opener of vectors that were trained with this order
        purpose = f"{order.run} {asked.opener} {sha256(sealed).hexdigest()} {trained}".encode()
        size = next(iter(kept.vectors.values())).size
        layout = CKKSLayout(size, None, parameters, order.round, purpose)
        client = CKKSClient(layout, key.run_key(sealed, order.run, parameters))
        if asked.stage == "open":
            return self._opened(client, asked, layout.decoded(bytes_of(order.tensors.get(TOTAL))))
        policy.check_secure_sum(len(asked.clients))
        kept.begin(asked.opener, "was encrypted for {} to open it")

        def say(one: int) -> dict[str, Tensor]:
            values = torch.from_numpy(kept.vectors[one])
            sent, sender = client.encrypt(values, one, policy.fewest_in_secure_sum)
            return {MESSAGE: as_tensor(sent.encode()), NONCE: as_tensor(sender.nonce)}

        return _of_each(order, say, {FEWEST: policy.fewest_in_secure_sum})

    def _sealed(self, key: SumKey, run: str, parameters: CKKSParameters) -> bytes:
        """Return the run's CKKS key, encrypted; the first call makes the key and stores it on disk."""
        if self._key_file.exists():
            sealed = self._key_file.read_bytes()
            try:
                key.run_key(sealed, run, parameters)
            except ValueError:
                log.warning(
                    "the key in %s is of other parameters: there is a new one", self._key_file
                )
            else:
                return sealed
        sealed = key.new_run_key(run, parameters)
        with whole_file(self._key_file) as file:
            file.write(sealed)
        return sealed

    def _opened(self, client: CKKSClient, asked: EncryptedStage, total: Any) -> OrderResult:
        senders = asked.senders
        if asked.opener != self._policy.name:
            raise OrderRefused("sum", f"site {asked.opener} opens this sum")
        self._policy.check_secure_sum(len(senders))
        if len(senders) < (fewest := max(each.fewest for each in senders)):
            raise OrderRefused(
                "policy", f"a site requires {fewest} clients in a sum, and it has {len(senders)}"
            )
        values = client.open(total, senders)
        self._kept.begin(asked.opener, "was encrypted for {} to open it")
        self._kept.open("this site", (each.client for each in senders))
        self._kept.count_opening()
        return OrderResult(tensors={OPENED: values})


def _of_each(
    order: Order, say: Callable[[int], dict[str, Tensor]], options: Mapping[str, Any] | None = None
) -> OrderResult:
    """Return an answer with ``say(client)`` of each client of an order; a client fails if its call raises."""
    answers: list[ClientAnswer] = []
    tensors: dict[str, Tensor] = {}
    for client in order.clients:
        try:
            said = say(client)
        except (ValueError, KeyError, OrderRefused) as error:
            log.warning("hidden sum, client %d: %r", client, error)
            answers.append(ClientAnswer(client=client, failure="sum"))
        else:
            answers.append(ClientAnswer(client=client))
            tensors |= {f"{client}/{name}": tensor for name, tensor in said.items()}
    return OrderResult(answers, tensors, options=options or {})


class SiteVectors:
    """Stores on disk a site's vectors for a round's secure or encrypted sum, and which sums it has helped to open.

    Args:
        folder: folder of one run at a site.

    Attributes:
        round: round of the vectors; -1 if there are none.
        vectors: vectors by client.
        rules: options of the sum by the configuration, see `rules_of`.
        used: latest round in which each client has taken part in the secure-sum protocol, by its run.
    """

    def __init__(self, folder: Path) -> None:
        self._vectors_file, self._told_file = folder / "vectors.npz", folder / "sums.json"
        self.round = -1
        self.vectors: dict[int, RingIntegers] = {}
        self.rules: Mapping[str, Any] = {}
        self.used: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self._told: dict[str, Any] = {"round": -1}
        if self._vectors_file.exists():
            with np.load(self._vectors_file, allow_pickle=False) as kept:
                told = json.loads(str(kept["told"]))
                self.round, self.rules = told["round"], told["rules"]
                self.vectors = {int(name): kept[name] for name in kept.files if name != "told"}
        if self._told_file.exists():
            self._told = json.loads(self._told_file.read_text())
            self.used |= {int(client): used for client, used in self._told.pop("used").items()}

    def keep(
        self, round_index: int, vectors: Mapping[int, RingIntegers], rules: Mapping[str, Any]
    ) -> None:
        """Store the vectors of a round on disk, before the answer that reports them is sent."""
        arrays: dict[str, Any] = {str(client): vector for client, vector in vectors.items()}
        told = json.dumps({"round": round_index, "rules": dict(rules)})
        with whole_file(self._vectors_file) as file:
            np.savez(file, told=np.array(told), **arrays)
        self.round, self.vectors, self.rules = round_index, dict(vectors), rules

    def begin(self, parties: Any, how: str) -> None:
        """Record on disk who takes part in a round's sum, or which site decrypts it, before any answer is sent.

        Raises:
            OrderRefused: if the round began with other participants or another opener.
        """
        if self._told["round"] != self.round:
            self._told = {"round": self.round, "parties": parties, "opened": {}}
        elif self._told["parties"] != parties:
            before = how.format(self._told["parties"])
            raise OrderRefused("sum", f"round {self.round} {before}")
        self.save()

    def open(self, who: str, clients: Iterable[int]) -> None:
        """Record on disk whose vectors are in the sum that ``who`` helps to open, before any answer is sent.

        Raises:
            OrderRefused: if ``who`` has helped to open another sum of this round.
        """
        asked = sorted(clients)
        opened = self._told["opened"].setdefault(who, asked)
        if opened != asked:
            raise OrderRefused(
                "sum", f"{who} has opened the sum of clients {opened}, not that of {asked}"
            )
        self.save()

    def count_opening(self) -> None:
        """Count how often the round's encrypted sum was decrypted, before the sum leaves.

        Raises:
            OrderRefused: if there were too many: their mean would have less noise than hides the key.
        """
        self._told["openings"] = self._told.get("openings", 0) + 1
        if self._told["openings"] > MOST_OPENINGS:
            raise OrderRefused(
                "sum",
                f"{MOST_OPENINGS} sums of round {self.round} were opened already, the most allowed",
            )
        self.save()

    def save(self) -> None:
        """Write to disk which sums were opened and which rounds clients have used, before a message leaves."""
        with whole_file(self._told_file) as file:
            file.write(json.dumps(self._told | {"used": self.used}).encode())
