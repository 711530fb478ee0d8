"""An encrypted update as a message, and the layout of its coordinates.

A container (`fl_lightning.core.container`) of the kind ``encrypted`` with the tensors sender, ciphertexts (one
a row) and clear (float32). The ciphertexts of CKKS have tags that only clients can check, see `LinearTags`.

All coordinates are encrypted, or only the most sensitive ones, which saves time and bytes; the server can read
the other coordinates. Source: Jin et al. 2023 (2303.10837), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from fl_lightning.core.container import Form, as_tensor, bytes_of, form_of, read, size_of, write
from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters

_KIND = "encrypted"


@dataclass(frozen=True, eq=False)
class EncryptedUpdate:
    """An update, or a sum of updates: ciphertexts of the encrypted coordinates, and the others in clear.

    Args:
        ciphertexts: ciphertexts of the encrypted coordinates in order, all of one length.
        clear: other coordinates in order, float32.
        sender: id of the client; 0 for a sum.

    Example:
        >>> update = EncryptedUpdate((b"one", b"two"), torch.tensor([1.0]), sender=7)
        >>> data = update.encode()
        >>> len(data) == update.num_bytes
        True
        >>> arrived = CKKSLayout(5001, selected=torch.arange(5000)).decoded(data)
        >>> arrived.ciphertexts, arrived.sender
        ((b'one', b'two'), 7)
    """

    ciphertexts: tuple[bytes, ...]
    clear: Tensor
    sender: int = 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the update as a message."""
        return encrypted_size(len(self.ciphertexts), self._width, self.clear.numel())

    def encode(self) -> bytes:
        """Return the update as the bytes of a message."""
        ciphertexts = as_tensor(b"".join(self.ciphertexts))
        tensors = {
            "sender": torch.tensor(self.sender),
            "ciphertexts": ciphertexts.reshape(len(self.ciphertexts), self._width),
            "clear": self.clear.float(),
        }
        return write(_KIND, {}, tensors)

    @property
    def _width(self) -> int:
        return len(self.ciphertexts[0]) if self.ciphertexts else 0


def encrypted_size(num_ciphertexts: int, width: int, num_clear: int) -> int:
    """Return the length in bytes of an encrypted update, from its numbers of ciphertexts and of clear coordinates."""
    return size_of(_KIND, {}, _forms(num_ciphertexts, width, num_clear))


def _forms(num_ciphertexts: int, width: int, num_clear: int) -> dict[str, Form]:
    return {
        "sender": ("I64", ()),
        "ciphertexts": ("U8", (num_ciphertexts, width)),
        "clear": ("F32", (num_clear,)),
    }


@dataclass(frozen=True, eq=False)
class CKKSLayout:
    """Layout of encrypted updates: which coordinates are encrypted, and by which parameters of CKKS.

    Args:
        size: k, the number of coordinates of an update.
        selected: indices of the encrypted coordinates, int64, increasing; None for all.
        parameters: parameters of CKKS.
        round_index: number of the round; messages of other rounds are refused.
        purpose: further facts on which all senders agree.

    Raises:
        ValueError: if the indices are not increasing from 0 to k - 1.
    """

    size: int
    selected: Tensor | None = None
    parameters: CKKSParameters = CKKSParameters()  # noqa: RUF009 - frozen
    round_index: int = 0
    purpose: bytes = b""

    def __post_init__(self) -> None:
        if self.selected is None:
            return
        edges = torch.tensor([-1, *self.selected.tolist(), self.size])
        if self.selected.dtype != torch.int64 or not (edges.diff() > 0).all():
            raise ValueError(f"selected must be increasing int64 indices below size={self.size}")

    @cached_property
    def identity(self) -> bytes:
        """Hash of the layout, 32 bytes, on which all tags depend: a sum over another layout or round is refused."""
        chosen = b"all" if self.selected is None else self.selected.cpu().numpy().tobytes()
        settings = (
            f"{self.size} {self.parameters} {self.round_index} {self.purpose.hex()} ".encode()
        )
        return sha256(settings + chosen).digest()

    @property
    def num_encrypted(self) -> int:
        """Number of encrypted coordinates."""
        return self.size if self.selected is None else self.selected.numel()

    @property
    def num_ciphertexts(self) -> int:
        """Number of ciphertexts of one update."""
        return -(-self.num_encrypted // self.parameters.slots)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split the values to encrypt into parts that fit into one ciphertext each."""
        return torch.split(values, self.parameters.slots) if len(values) else ()

    def parted(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split an update's values into those to encrypt and those sent in clear."""
        if self.selected is None:
            return values, values[:0]
        is_clear = torch.ones(self.size, dtype=torch.bool)
        is_clear[self.selected] = False
        return values[self.selected], values[is_clear]

    def joined(self, encrypted: Tensor, clear: Tensor) -> Tensor:
        """Join decrypted and clear coordinates of an update in their order, float64."""
        if self.selected is None:
            return encrypted
        values = torch.empty(self.size, dtype=torch.float64)
        is_clear = torch.ones(self.size, dtype=torch.bool)
        is_clear[self.selected] = False
        values[is_clear] = clear.double()
        values[self.selected] = encrypted
        return values

    def decoded(self, data: bytes) -> EncryptedUpdate:
        """Parse an encrypted update from the bytes of a message; the bytes are not trusted.

        Raises:
            MessageError: if the update does not have this layout. The contents of ciphertexts are not checked.
        """
        fields, tensors = read(data, _KIND)
        forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        width = forms.get("ciphertexts", ("", (0,)))[1][-1:]
        num_clear = self.size - self.num_encrypted
        if fields or forms != _forms(self.num_ciphertexts, sum(width), num_clear):
            raise MessageError(
                f"no encrypted update of {self.num_ciphertexts} ciphertexts and {num_clear} numbers in "
                "clear"
            )
        if not torch.isfinite(tensors["clear"]).all():
            raise MessageError("a number in clear is not finite")
        if tensors["sender"] < 0:
            raise MessageError("the sender's id is negative")
        found = tuple(map(bytes_of, tensors["ciphertexts"]))
        return EncryptedUpdate(found, tensors["clear"], int(tensors["sender"]))


def most_sensitive(sensitivities: Tensor, fraction: float) -> Tensor:
    """Return the indices of the most sensitive coordinates, a fraction of all, in increasing order.

    Args:
        sensitivities: sensitivities ≥ 0, shape (k,).
        fraction: fraction of the coordinates, in (0, 1].

    Example:
        >>> most_sensitive(torch.tensor([0.1, 3.0, 0.0, 2.0]), 0.5)
        tensor([1, 3])
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction must be in (0, 1], got {fraction}: it is the share of coordinates to encrypt"
        )
    count = math.ceil(fraction * sensitivities.numel())
    return torch.topk(sensitivities, count).indices.sort().values
