"""What a scheme of encryption does in one round of `EncryptedMean`.

Sums that sites encrypt: what a configuration says of them, and what comes of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from fl_lightning.secure.encryption.ciphertext_numbers import Sender
from fl_lightning.secure.encryption.ckks import CKKSClient, CKKSKeys, CKKSServer
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.server.protected import ProtectionCost


class EncryptedRound(Protocol):
    """Clients and server of one round."""

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """Return what a client sends.

        Raises:
            ValueError: if a number is not finite, or too large for the scheme.
        """

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """Return the server's sum with one more update in it; None for the sum of nothing.

        Raises:
            MessageError: if the update is not one of a client of this round.
        """

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """Return what a client decrypts, divided by the examples of all, float64."""


@final
class CKKSRound:
    """One round with CKKS: clients multiply an update by its share of the most examples.

    Args:
        layout: which coordinates are encrypted.
        keys: of the run.
        most_examples: that there may be in a round.
    """

    def __init__(self, layout: CKKSLayout, keys: CKKSKeys, most_examples: int) -> None:
        self._client, self._server = CKKSClient(layout, keys), CKKSServer(layout)
        self._most = most_examples
        self._senders: list[Sender] = []

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """See `EncryptedRound`."""
        values = delta.double() * (num_examples / self._most)
        sent, told = self._client.encrypt(values, sender)
        self._senders.append(told)
        return sent

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """See `EncryptedRound`; the examples are in the update already."""
        return self._server.plus(total, sent)

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """See `EncryptedRound`."""
        return self._client.open(total, self._senders) * (self._most / num_examples)


@dataclass(frozen=True)
class EncryptedSum:
    """Options of an encrypted sum over sites.

    Attributes:
        degree: N of CKKS.
        scheme: of the encryption.
    """

    degree: int
    scheme: str = "ckks"


@dataclass(frozen=True)
class OpenedSum:
    """Result of a sum over sites.

    Attributes:
        values: Σ a_k Δ_k of those who are in it, float64 of shape (k,).
        clients: who is in it.
        protection_cost: of the sum.
    """

    values: Tensor
    clients: frozenset[int]
    protection_cost: ProtectionCost
