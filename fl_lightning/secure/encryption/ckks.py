"""Sums of encrypted updates with CKKS: the server adds ciphertexts that it cannot read.

    Σ_i Enc(a_i x_i) ≈ Enc(Σ_i a_i x_i)         a_i: client i's share of the examples

All clients have the same secret key and the server has none; no client may collude with the server. Clients
multiply by their share before they encrypt, so ciphertexts are only added, number by number. A client decrypts a
sum only if its tags show that it is the sum of the messages of named clients of this round: the server can have no
other ciphertext decrypted. CKKS is approximate, and exact decrypted values reveal the error and thus the key
(Li and Micciancio 2021, EUROCRYPT): decrypted values get noise, see `flooded`. Scheme: Cheon, Kim, Kim, Song 2017, in TenSEAL (extra ``he``).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.encryption.ciphertext_numbers import (
    NONCE_SIZE,
    NUM_TAGS,
    CKKSParameters,
    LinearTags,
    Numbers,
    Packed,
    Sender,
    Tags,
    library,
    numbers_of,
    primes_of,
    vector_bytes,
)
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.secure.entropy import Draws, uniform_draws

# standard deviation of the noise in decrypted values. With the default parameters the error of CKKS is 2^-70, so
# 2 log2(noise / error) - log2(12 numbers) = 46 bits of security are left after 2^30 numbers were opened with a
# key (Li, Micciancio, Schultz and Sorrell 2022, CRYPTO).
FLOOD = 2.0**-30


@dataclass(frozen=True)
class CKKSKeys:
    """Keys of CKKS that all clients share and the server never has.

    Attributes:
        tags: key of the tags, 32 bytes.
        secret: key that encrypts and decrypts, as TenSEAL's bytes.
    """

    tags: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"CKKSKeys({len(self.secret)} secret bytes)"


def generate_keys(parameters: CKKSParameters) -> CKKSKeys:
    """Return new keys of CKKS and of tags, from the operating system's entropy."""
    context = library().context(
        library().SCHEME_TYPE.CKKS,
        parameters.degree,
        coeff_mod_bit_sizes=list(parameters.coefficient_bits),
        # all who encrypt have the secret key, with which it takes half the time
        encryption_type=library().ENCRYPTION_TYPE.SYMMETRIC,
    )
    context.global_scale = 2.0**parameters.scale_bits
    secret = context.serialize(
        save_public_key=False,
        save_secret_key=True,
        save_galois_keys=False,
        save_relin_keys=False,
    )
    return CKKSKeys(secrets.token_bytes(32), secret)


class CKKSClient:
    """A client's side of CKKS: encrypts updates, and decrypts their sum.

    Args:
        layout: layout of encrypted updates.
        keys: keys of the clients.

    Example:
        >>> layout = CKKSLayout(size=3, selected=torch.tensor([0, 2]))
        >>> client, server = CKKSClient(layout, generate_keys(layout.parameters)), CKKSServer(layout)
        >>> one, from_one = client.encrypt(torch.tensor([1.0, 2.0, 3.0]), client=1)
        >>> two, from_two = client.encrypt(torch.tensor([5.0, 6.0, -1.0]), client=2)
        >>> client.open(server.sum([one, two]), [from_one, from_two]).round(decimals=5)
        tensor([6., 8., 2.], dtype=torch.float64)
        >>> client.open(one, [from_one, from_two])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: this is not the sum of what clients 1, 2 have sent ...
    """

    def __init__(self, layout: CKKSLayout, keys: CKKSKeys) -> None:
        self._layout, self._keys = layout, keys
        self._context = library().context_from(keys.secret)
        self._packed = Packed(layout.parameters)
        self._models: dict[int, Any] = {}  # vectors of the library, by size

    @cached_property
    def _tags(self) -> LinearTags:
        parameters = self._layout.parameters
        primes = primes_of(parameters)
        return LinearTags(self._keys.tags, self._layout.identity, primes, 2 * parameters.degree)

    def encrypt(
        self, values: Tensor, client: int = 0, fewest: int = 2
    ) -> tuple[EncryptedUpdate, Sender]:
        """Encrypt an update, and return it with the facts about its sender that decrypting the sum needs.

        Args:
            values: update times its share, shape (size,).
            client: id of the client, ≥ 0.
            fewest: smallest number of clients in a sum with this update.

        Raises:
            ValueError: if the shape is wrong, or a number is not finite or too large.
        """
        layout = self._layout
        if values.shape != (layout.size,):
            raise ValueError(f"values must have shape ({layout.size},), got {values.shape}")
        # a NaN compares as false
        if not bool((values.abs() < layout.parameters.largest).all()):
            raise ValueError(
                f"numbers must be finite and below {layout.parameters.largest:g}: clip the "
                "update, or leave more bits between the primes and the scale"
            )
        hidden, clear = layout.parted(values.detach().double().cpu())
        parts = [numbers_of(self._vector(part)) for part in layout.split(hidden)]
        sender = Sender(client, secrets.token_bytes(NONCE_SIZE), fewest)
        tags = self._tags.of(parts, sender)
        return _message(self._packed, parts, tags, clear, client), sender

    def open(self, total: EncryptedUpdate, senders: Sequence[Sender]) -> Tensor:
        """Decrypt a sum of updates, and return it with Gaussian noise of std `FLOOD`, float64 of shape (size,).

        Args:
            total: sum of the server.
            senders: senders of the updates in the sum.

        Raises:
            MessageError: if it is not the sum of the senders' updates of this round.
        """
        clients = [sender.client for sender in senders]
        parts, tags = _parts(self._packed, self._layout, total)
        is_sum = self._tags.are_of_sum(parts, tags, senders)
        if not is_sum or len(set(clients)) < len(clients):
            raise MessageError(
                f"this is not the sum of what clients {', '.join(map(str, clients))} have sent in this "
                "round, or it changed on its way: it was not opened"
            )
        slots, left = self._layout.parameters.slots, self._layout.num_encrypted
        numbers = [
            self._decrypted(part, min(slots, left - at * slots)) for at, part in enumerate(parts)
        ]
        values = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.float64)
        return self._layout.joined(flooded(values, FLOOD), total.clear)

    def _vector(self, values: Tensor) -> Any:
        """Encrypt values, and return the ciphertext of TenSEAL."""
        [ciphertext] = library().ckks_vector(self._context, values.tolist()).ciphertext()
        return ciphertext

    def _decrypted(self, part: Numbers, size: int) -> Tensor:
        if size not in self._models:
            self._models[size] = library().ckks_vector(self._context, [0.0] * size)
        data = vector_bytes(part, self._models[size])
        found = library().ckks_vector_from(self._context, data)
        return torch.tensor(found.decrypt(), dtype=torch.float64)


class CKKSServer:
    """The server's side of CKKS: adds encrypted updates, without a key and without TenSEAL.

    Args:
        layout: layout of encrypted updates.
    """

    def __init__(self, layout: CKKSLayout) -> None:
        self._layout, self._packed = layout, Packed(layout.parameters)
        self._primes = np.array(primes_of(layout.parameters), np.uint64)

    def sum(self, updates: Sequence[EncryptedUpdate]) -> EncryptedUpdate:
        """Return the sum of encrypted updates.

        Raises:
            MessageError: as `plus` does.
        """
        total = None
        for update in updates:
            total = self.plus(total, update)
        assert total is not None, "there is no update to add"
        return total

    def plus(self, total: EncryptedUpdate | None, update: EncryptedUpdate) -> EncryptedUpdate:
        """Add an encrypted update to a sum.

        Args:
            total: sum of earlier updates; None for the first update.
            update: update to add.

        Raises:
            MessageError: if the update does not have this layout.
        """
        parts, tags = _parts(self._packed, self._layout, update)
        clear = update.clear.double()
        if total is not None:
            others, other_tags = _parts(self._packed, self._layout, total)
            parts = [self._packed.sum(one, o) for one, o in zip(parts, others, strict=True)]
            tags = [(one + o) % self._primes for one, o in zip(tags, other_tags, strict=True)]
            clear = clear + total.clear.double()
        return _message(self._packed, parts, tags, clear, 0)


def flooded(values: Tensor, std: float, draw: Draws | None = None) -> Tensor:
    """Add Gaussian noise to decrypted values: it hides the error of CKKS, which could reveal the key.

    Args:
        values: decrypted values, before they leave the clients.
        std: standard deviation of the noise; for s bits of security about 2^(s/2) times the largest error
            of decryption.
        draw: draws uniform numbers; None for the operating system's entropy.
    """
    uniform = torch.from_numpy((draw or uniform_draws())(2 * values.numel())).view(2, -1)
    radius = (-2 * torch.log1p(-uniform[0])).sqrt()  # Box and Muller 1958
    return values + std * radius * torch.cos(2 * math.pi * uniform[1])


def _message(
    packed: Packed, parts: Sequence[Numbers], tags: Sequence[Tags], clear: Tensor, sender: int
) -> EncryptedUpdate:
    """Return an encrypted update of ciphertexts, each followed by its tags, and coordinates in clear."""
    pieces = (
        packed.write(part) + tag.astype("<u8").tobytes()
        for part, tag in zip(parts, tags, strict=True)
    )
    return EncryptedUpdate(tuple(pieces), clear.float(), sender)


def _parts(
    packed: Packed, layout: CKKSLayout, update: EncryptedUpdate
) -> tuple[list[Numbers], list[Tags]]:
    """Return the ciphertexts and the tags of an encrypted update, as numbers.

    Raises:
        MessageError: if the update does not have this layout.
    """
    if len(update.ciphertexts) != layout.num_ciphertexts:
        raise MessageError(
            f"{len(update.ciphertexts)} ciphertexts instead of {layout.num_ciphertexts}"
        )
    if update.clear.numel() != layout.size - layout.num_encrypted:
        raise MessageError(f"{update.clear.numel()} numbers in clear are not those of the round")
    shape = (NUM_TAGS, len(layout.parameters.coefficient_bits) - 1)
    size = packed.num_bytes
    if any(len(each) != size + 8 * math.prod(shape) for each in update.ciphertexts):
        raise MessageError("a ciphertext is of another length")
    parts = [packed.read(each[:size]) for each in update.ciphertexts]
    tags = [
        np.frombuffer(each[size:], "<u8").astype(np.uint64).reshape(shape)
        for each in update.ciphertexts
    ]
    return parts, tags


def ciphertext_bytes(parameters: CKKSParameters) -> int:
    """Return the number of bytes that a ciphertext and its tags fill."""
    return Packed(parameters).num_bytes + 8 * NUM_TAGS * (len(parameters.coefficient_bits) - 1)
