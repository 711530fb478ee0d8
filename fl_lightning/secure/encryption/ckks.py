"""Weighted sums of encrypted updates with CKKS: the server adds what it cannot read.

    server: Enc(Σ_i a_i x_i) ≈ Σ_i a_i Enc(x_i)         a_i: client i's share of the examples

All clients have the same secret key, the server has none: it must follow the rules, and no client
may work with it. CKKS is approximate, and whoever sees a decrypted result beside its ciphertext
learns of the error and, from that, of the key (Li and Micciancio 2021, EUROCRYPT): a result that
leaves the clients needs noise, `flooded`. The library reads nothing that has no tag of a party of the
run: malformed ciphertexts can end the process that reads them. Scheme: Cheon, Kim, Kim, Song 2017, in TenSEAL (extra
``he``).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.secure.encryption.ckks_layout import CKKSLayout
from fl_lightning.secure.encryption.ckks_parameters import CKKSParameters
from fl_lightning.secure.encryption.encrypted_update import TAG_SIZE, EncryptedUpdate
from fl_lightning.secure.entropy import Draws, uniform_draws
from fl_lightning.updates.wire.reader import DecodeError

_UPDATE, _SUM = b"CKKS update", b"CKKS sum"


@dataclass(frozen=True)
class CKKSKeys:
    """What `generate_keys` makes.

    Attributes:
        secret: for the clients, with everything that is in
        public: for the server, which can add with it, but neither encrypt nor decrypt. Both begin
            with the key of tags, and nobody else may have either.
    """

    secret: bytes
    public: bytes

    def __repr__(self) -> str:
        return f"CKKSKeys({len(self.secret)} secret bytes, {len(self.public)} public bytes)"


def generate_keys(parameters: CKKSParameters) -> CKKSKeys:
    """Return new keys, from the operating system's entropy."""
    context = _tenseal().context(
        _tenseal().SCHEME_TYPE.CKKS,
        parameters.degree,
        coeff_mod_bit_sizes=list(parameters.coefficient_bits),
        # whoever encrypts has the secret key: with it that takes half the time
        encryption_type=_tenseal().ENCRYPTION_TYPE.SYMMETRIC,
    )
    context.global_scale = 2.0**parameters.scale_bits
    secret, public = (
        context.serialize(
            save_public_key=True,
            save_secret_key=is_secret,
            save_galois_keys=False,
            save_relin_keys=False,
        )
        for is_secret in (True, False)
    )
    tag_key = secrets.token_bytes(TAG_SIZE)
    return CKKSKeys(tag_key + secret, tag_key + public)


class CKKSClient:
    """Encrypts updates and decrypts their sum.

    Args:
        layout: which coordinates are encrypted.
        secret: the clients' key.

    Example:
        >>> layout = CKKSLayout(size=3, selected=torch.tensor([0, 2]))
        >>> keys = generate_keys(layout.parameters)
        >>> client, server = CKKSClient(layout, keys.secret), CKKSServer(layout, keys.public)
        >>> one = client.encrypt(torch.tensor([1.0, 2.0, 3.0]))
        >>> two = client.encrypt(torch.tensor([5.0, 6.0, -1.0]), sender=1)
        >>> client.decrypt(server.weighted_sum([(one, 0.75), (two, 0.25)])).round(decimals=5)
        tensor([2., 3., 2.], dtype=torch.float64)
    """

    def __init__(self, layout: CKKSLayout, secret: bytes) -> None:
        self._layout, self._tag_key = layout, secret[:TAG_SIZE]
        self._context = _tenseal().context_from(secret[TAG_SIZE:])
        if not self._context.is_private():
            raise ValueError("the key is the server's: clients need the secret one")

    def encrypt(self, delta: Tensor, sender: int = 0) -> EncryptedUpdate:
        """Return the update, encrypted.

        Args:
            delta: shape (size,).
            sender: whose it is, ≥ 0.

        Raises:
            ValueError: if it has another shape, or numbers that are not finite or too large.
        """
        if delta.shape != (self._layout.size,):
            raise ValueError(f"delta must have shape ({self._layout.size},), got {delta.shape}")
        # a NaN compares as false
        if not bool((delta.abs() < self._layout.parameters.largest).all()):
            raise ValueError(
                f"numbers must be finite and below {self._layout.parameters.largest:g}: clip the "
                "update, or leave more bits between the first prime and the scale"
            )
        values, clear = self._layout.parted(delta.detach().double().cpu())
        slots, vector = self._layout.parameters.slots, _tenseal().ckks_vector
        ciphertexts = tuple(
            vector(self._context, part.tolist()).serialize() for part in _parts(values, slots)
        )
        update = EncryptedUpdate(ciphertexts, clear.float(), sender)
        return update.signed(self._tag_key, _UPDATE + self._layout.identity)

    def decrypt(self, total: EncryptedUpdate) -> Tensor:
        """Return a sum's coordinates, float64 of shape (size,).

        Raises:
            DecodeError: if it is not the server's sum of this round, or none of this scheme.
        """
        total.check(self._tag_key, _SUM + self._layout.identity)
        loaded = _loaded(self._context, self._layout, total)
        numbers = [torch.tensor(each.decrypt(), dtype=torch.float64) for each in loaded]
        values = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.float64)
        return self._layout.joined(values, total.clear)


class CKKSServer:
    """Adds encrypted updates.

    Args:
        layout: which coordinates are encrypted.
        public: the server's key.

    Raises:
        ValueError: if the key can decrypt.
    """

    def __init__(self, layout: CKKSLayout, public: bytes) -> None:
        self._layout, self._tag_key = layout, public[:TAG_SIZE]
        self._context = _tenseal().context_from(public[TAG_SIZE:])
        self._added: set[int] = set()
        if self._context.is_private():
            raise ValueError("the key can decrypt: the server must have the public one only")

    def weighted_sum(self, updates: Iterable[tuple[EncryptedUpdate, float]]) -> EncryptedUpdate:
        """Return Σ a_i x_i, with memory for one sum.

        Args:
            updates: each with its share a_i > 0 of all examples; shares sum to at most 1, so that
                the sum fits where each update did.

        Raises:
            ValueError: if shares are outside their range or there is no update.
            DecodeError: if an update is not a client's of this round, or the second of a client, or
                if a ciphertext is missing.
        """
        self._added = set()
        return self._weighted_sum(updates)

    def _weighted_sum(self, updates: Iterable[tuple[EncryptedUpdate, float]]) -> EncryptedUpdate:
        ciphertexts: list[Any] = [None] * self._layout.num_ciphertexts
        clear, shares = torch.zeros(self._layout.size - self._layout.num_encrypted).double(), 0.0
        for update, share in updates:
            shares += share
            if not share > 0 or shares > 1 + 1e-9:
                raise ValueError(f"shares must be positive and sum to at most 1, got {share}")
            update.check(self._tag_key, _UPDATE + self._layout.identity)
            if update.sender in self._added:
                raise DecodeError(f"client {update.sender}'s update is in the sum already")
            self._added.add(update.sender)
            arrived = _loaded(self._context, self._layout, update)
            for at, ciphertext in enumerate(arrived):
                scaled = ciphertext * share
                ciphertexts[at] = scaled if ciphertexts[at] is None else ciphertexts[at] + scaled
            clear += share * update.clear.double()
        if not shares:
            raise ValueError("there is no update to add")
        return self._signed(tuple(each.serialize() for each in ciphertexts), clear.float())

    def plus(
        self, total: EncryptedUpdate | None, update: EncryptedUpdate, share: float
    ) -> EncryptedUpdate:
        """Return a weighted sum with one more update in it, for updates that come one by one.

        Args:
            total: what this returned before; None for the first update.
            update: one more.
            share: a_i > 0; those of all updates must sum to at most 1.

        Raises:
            ValueError: if the share is outside its range.
            DecodeError: as `weighted_sum` does.
        """
        if total is None:
            return self.weighted_sum([(update, share)])
        total.check(self._tag_key, _SUM + self._layout.identity)
        scaled = self._weighted_sum([(update, share)])
        pairs = zip(
            _loaded(self._context, self._layout, total),
            _loaded(self._context, self._layout, scaled),
            strict=True,
        )
        ciphertexts = tuple((one + other).serialize() for one, other in pairs)
        return self._signed(ciphertexts, total.clear + scaled.clear)

    def _signed(self, ciphertexts: tuple[bytes, ...], clear: Tensor) -> EncryptedUpdate:
        total = EncryptedUpdate(ciphertexts, clear)
        return total.signed(self._tag_key, _SUM + self._layout.identity)


def flooded(values: Tensor, std: float, draw: Draws | None = None) -> Tensor:
    """Return values with Gaussian noise, which hides the scheme's own error from the public.

    Args:
        values: decrypted, about to leave the clients.
        std: of the noise; for s bits of security about 2^(s/2) times the largest error that the
            decryption had.
        draw: of uniform numbers; None for the operating system's entropy.
    """
    uniform = torch.from_numpy((draw or uniform_draws())(2 * values.numel())).view(2, -1)
    radius = (-2 * torch.log1p(-uniform[0])).sqrt()  # Box and Muller 1958
    return values + std * radius * torch.cos(2 * math.pi * uniform[1])


def _parts(values: Tensor, size: int) -> tuple[Tensor, ...]:
    return torch.split(values, size) if len(values) else ()


def _loaded(context: Any, layout: CKKSLayout, update: EncryptedUpdate) -> Iterator[Any]:
    slots = layout.parameters.slots
    if len(update.ciphertexts) != layout.num_ciphertexts:
        raise DecodeError(
            f"{len(update.ciphertexts)} ciphertexts instead of {layout.num_ciphertexts}"
        )
    # whoever calls has checked the tag
    for at, data in enumerate(update.ciphertexts):
        try:
            ciphertext = _tenseal().ckks_vector_from(context, data)
        except ValueError as error:
            raise DecodeError(f"no ciphertext of this scheme: {error}") from None
        size = min(slots, layout.num_encrypted - at * slots)
        if ciphertext.size() != size:
            raise DecodeError(f"no ciphertext of {size} numbers: it has {ciphertext.size()}")
        yield ciphertext


def _tenseal() -> Any:
    """Return the library, which is imported only where it is used."""
    try:
        import tenseal
    except ImportError as error:
        raise ImportError("CKKS needs TenSEAL: pip install 'fl-lightning[he]'") from error
    return tenseal
