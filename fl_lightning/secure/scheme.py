"""What a scheme of encryption does in one round of `EncryptedMean`."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from fl_lightning.secure.encryption.ckks import CKKSClient, CKKSKeys, CKKSServer
from fl_lightning.secure.encryption.ckks_layout import CKKSLayout
from fl_lightning.secure.encryption.encrypted_update import EncryptedUpdate


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
            DecodeError: if the update is not one of a client of this round.
        """

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """Return what a client decrypts, divided by the examples of all, float64."""


@final
class CKKSRound:
    """One round with CKKS: the server multiplies an update by its share of the most examples.

    Args:
        layout: which coordinates are encrypted.
        keys: of the run.
        most_examples: that there may be in a round.
    """

    def __init__(self, layout: CKKSLayout, keys: CKKSKeys, most_examples: int) -> None:
        self._client = CKKSClient(layout, keys.secret)
        self._server = CKKSServer(layout, keys.public)
        self._most = most_examples

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """See `EncryptedRound`; the examples are the server's to multiply by."""
        return self._client.encrypt(delta, sender)

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """See `EncryptedRound`."""
        return self._server.plus(total, sent, num_examples / self._most)

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """See `EncryptedRound`."""
        return self._client.decrypt(total) * (self._most / num_examples)


def ckks_bytes(layout: CKKSLayout, keys: CKKSKeys) -> int:
    """Return the length of one full ciphertext, about: ciphertexts differ in a few bytes."""
    in_first = min(layout.num_encrypted, layout.parameters.slots)
    first = CKKSLayout(in_first, parameters=layout.parameters)
    return CKKSClient(first, keys.secret).encrypt(torch.zeros(in_first)).num_bytes
