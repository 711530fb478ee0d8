"""What all parties of one encrypted sum agree on, as it travels with every order of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, Literal, get_args

from fl_lightning.core.plain_json import MessageError, check_whole
from fl_lightning.flower.messages import check_clients, check_site
from fl_lightning.secure.encryption.ciphertext_numbers import NONCE_SIZE, CKKSParameters, Sender
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout

SCHEME = "ckks"
# "key": make the run's key; "encrypt": send your clients' vectors; "open": decrypt the sum
EncryptedStage = Literal["key", "encrypt", "open"]
# names of what travels
KEY, TOTAL, OPENED = "stage/sum/key", "stage/sum/total", "stage/sum/opened"
MESSAGE, NONCE, FEWEST = "stage/sum/message", "stage/sum/nonce", "fewest"


@dataclass(frozen=True)
class EncryptedAgreed:
    """A sum and who opens it.

    Attributes:
        run: of the sites.
        round: of the run.
        size: coordinates of a vector.
        degree: of the scheme, see `CKKSParameters`.
        opener: site that opens it.
        clients: of the round, as far as they have trained.

    Raises:
        ValueError: for values out of range.
    """

    run: str
    round: int
    size: int
    degree: int
    opener: str
    clients: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("round", "size", "degree"):
            check_whole(name, getattr(self, name))
        check_site(self.opener)
        check_clients(self.clients)
        _ = self.parameters

    @property
    def parameters(self) -> CKKSParameters:
        """Of the scheme."""
        return CKKSParameters(degree=self.degree)

    def layout(self, sealed_key: bytes, trained_on: str) -> CKKSLayout:
        """Return what messages are bound to: the run, the round, its key, who opens the sum.

        Args:
            sealed_key: of the run.
            trained_on: what clients were given to train from, see `agreed.trained_on`.
        """
        purpose = f"{self.run} {self.opener} {sha256(sealed_key).hexdigest()} {trained_on}".encode()
        return CKKSLayout(self.size, None, self.parameters, self.round, purpose)

    def options(self, stage: EncryptedStage, senders: tuple[Sender, ...] = ()) -> dict[str, Any]:
        """Return it as plain JSON, with the stage that an order is about and the senders of a sum."""
        told = [[each.client, each.nonce.hex(), each.fewest] for each in senders]
        about = asdict(self) | {"clients": list(self.clients)}
        return {"scheme": SCHEME, "stage": stage, "senders": told, "sum": about}

    @classmethod
    def of_options(
        cls, options: Mapping[str, Any]
    ) -> tuple[EncryptedAgreed, EncryptedStage, tuple[Sender, ...]]:
        """Return what `options` wrote.

        Raises:
            ValueError: if it cannot have.
        """
        parts: list[Any] = [options.get(name) for name in ("sum", "stage", "senders")]
        about, stage, told = parts
        names = [field.name for field in fields(cls)]
        if not isinstance(about, dict) or sorted(about) != sorted(names):
            raise ValueError("there is no sum, or one of another version")
        if stage not in get_args(EncryptedStage):
            raise ValueError(f"stage is {stage!r}")
        clients = about["clients"]
        if type(about["run"]) is not str or type(clients) is not list or type(told) is not list:
            raise ValueError("run must be a text, clients and senders must be lists")
        agreed = cls(**about | {"clients": tuple(clients)})
        return agreed, stage, tuple(map(_sender, told))


def is_encrypted(options: Mapping[str, Any]) -> bool:
    """Whether an order's options are of an encrypted sum."""
    return options.get("scheme") == SCHEME


def _sender(told: Any) -> Sender:
    if type(told) is not list or [type(each) for each in told] != [int, str, int]:
        raise ValueError("a sender is a client, its nonce and the fewest clients of its sums")
    client, nonce, fewest = told
    check_whole("sender", client)
    check_whole(FEWEST, fewest, 2)
    found = bytes.fromhex(nonce)
    if len(found) != NONCE_SIZE or found.hex() != nonce:
        raise MessageError(f"a nonce has {NONCE_SIZE} bytes")
    return Sender(client, found, fewest)
