"""Settings that all parties of a hidden sum agree on, secure or encrypted: they travel with each of its orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any, Literal, get_args

from fl_lightning.core.container import write
from fl_lightning.core.plain_json import MessageError, check_whole
from fl_lightning.flower.messages import Order, check_clients, check_site
from fl_lightning.secure.encryption.ciphertext_numbers import NONCE_SIZE, CKKSParameters, Sender
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout
from fl_lightning.secure.protocol.keys import Directory
from fl_lightning.secure.protocol.session import ProtocolStage, Session, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum

# names of the messages in orders and in answers
TO_CLIENT, FROM_CLIENT = "stage/sum/{}", "stage/sum/message"
TRAINED_ON = "trained_on"  # beside the rules of vectors that are kept


@dataclass(frozen=True)
class Agreed:
    """A session and its clients.

    Args:
        session: of the protocol.
        clients: in the order of their places.
        sites: of each of them.

    Raises:
        ValueError: if there are not as many of each, or a client twice.
    """

    session: Session
    clients: tuple[int, ...]
    sites: tuple[str, ...]

    def __post_init__(self) -> None:
        number = self.session.num_clients
        if not len(set(self.clients)) == len(self.clients) == len(self.sites) == number:
            raise ValueError(
                f"the session is of {number} clients, got {len(self.clients)} at {len(self.sites)} sites"
            )

    def place(self, client: int) -> int:
        """Return the place of a client; ValueError if it has none."""
        return self.clients.index(client)

    def directory(self, keys: Mapping[str, bytes]) -> Directory | None:
        """Return the signing keys by place, given those of sites; None where nothing is signed."""
        if not self.session.active:
            return None
        return Directory({at: keys.get(site, b"") for at, site in enumerate(self.sites)})

    def options(self, stage: ProtocolStage) -> dict[str, Any]:
        """Return it as plain JSON, with the stage that an order is about."""
        return {
            "session": asdict(self.session),
            "clients": list(self.clients),
            "sites": list(self.sites),
            "stage": int(stage),
        }

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> tuple[Agreed, ProtocolStage]:
        """Return what `options` wrote.

        Raises:
            ValueError: if it cannot have.
        """
        parts: list[Any] = [options.get(name) for name in ("session", "clients", "sites")]
        session, clients, sites = parts
        known = {field.name for field in fields(Session)}
        if not isinstance(session, Mapping) or session.keys() != known:
            raise ValueError("there is no session, or one of another version")
        for name, value in session.items():
            optional = value is None and name in ("num_neighbours", "min_survivors")
            kind = {"run": str, "purpose": str, "active": bool}.get(name, int)
            if not optional and type(value) is not kind:
                raise ValueError(f"{name} of the session is {value!r}")
        if not _all_of(clients, int) or not _all_of(sites, str):
            raise ValueError("clients and their sites must be lists of ids and of names")
        return cls(Session(**session), tuple(clients), tuple(sites)), ProtocolStage(
            options.get("stage", -1)
        )


def rules_of(secure_sum: SecureSum) -> dict[str, Any]:
    """Return, as plain JSON, what a configuration says of its sums."""
    return {name: value for name, value in asdict(secure_sum).items() if name != "run"}


def trained_on(order: Order) -> str:
    """Return the SHA-256 of what clients train on: run, round, configuration, model, options.

    Every hidden sum is bound to it, whatever its scheme. Vectors that were trained on something else are in no
    sum together: a server could have all clients but one train nothing.
    """
    about = {"run": order.run, "round": order.round, "configuration": order.configuration}
    return sha256(
        write("order", {**about, "options": dict(order.options)}, order.tensors)
    ).hexdigest()


def session_by(rules: Mapping[str, Any], given: Session) -> Session:
    """Return the session that a site has where a server gave one: equal, if it is honest.

    A server that had its own way with thresholds, signatures or neighbours could open more than sums; see also
    `trained_on`.

    Example:
        >>> from dataclasses import replace
        >>> rules = rules_of(SecureSum(bits=20))
        >>> given = Session(run="demo", round_index=0, num_clients=6, size=3, threshold=5, bits=20)
        >>> session_by(rules, given) == given
        True
        >>> lax = replace(given, threshold=4)
        >>> session_by(rules, lax) == lax
        False
    """
    rules = dict(rules)
    purpose, sparse = rules.pop(TRAINED_ON, ""), rules["sparse"]
    graph = None if sparse is None else SparseGraph(**sparse)
    secure_sum = SecureSum(**{**rules, "sparse": graph, "run": given.run})
    session = secure_sum.session(
        given.num_clients,
        size=given.size,
        round_index=given.round_index,
        graph_seed=given.graph_seed,
    )
    return replace(session, purpose=purpose)


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


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
    """True if an order's options are those of an encrypted sum."""
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
