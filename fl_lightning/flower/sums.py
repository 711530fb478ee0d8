"""Hidden sums over a network: what all parties agree on, secure or encrypted, and the key of encrypted ones.

An order of a sum has a stage and the settings of its sum, which a site compares with its own.

Encrypted sums: sites share a key that the server never has, a file of 32 bytes from `network init`. For every
run one site makes the key of CKKS and seals it, so that the server can hand it to the others without reading it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_lightning.core.container import write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import check_whole
from fl_lightning.flower.documents import Number, check_fields, read_document
from fl_lightning.flower.messages import Clients, Order, Site
from fl_lightning.flower.server.greeting import SiteFacts
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters, Sender
from fl_lightning.secure.encryption.ckks import CKKSKeys, ciphertext_bytes, generate_keys
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout
from fl_lightning.secure.protocol.keys import Directory
from fl_lightning.secure.protocol.session import Session, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum

# names of what travels in orders and in answers
TO_CLIENT, MESSAGE, NONCE = "stage/sum/{}", "stage/sum/message", "stage/sum/nonce"
KEY, TOTAL, OPENED = "stage/sum/key", "stage/sum/total", "stage/sum/opened"
FEWEST = "fewest"
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
    clients: Clients
    sites: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        number = self.session.num_clients
        if not len(self.clients) == len(self.sites) == number:
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


@dataclass(frozen=True)
class SecureStage:
    """Options of an order of a secure sum.

    Attributes:
        stage: see `ProtocolStage`.
        sum: of which it is a stage.
    """

    stage: Annotated[int, partial(check_whole, most=4)]
    sum: Agreed

    def __post_init__(self) -> None:
        check_fields(self)


def rules_of(secure_sum: SecureSum) -> dict[str, Any]:
    """Rules of a configuration for its sums, as plain JSON."""
    return {name: value for name, value in asdict(secure_sum).items() if name != "run"}


def trained_on(order: Order) -> str:
    """SHA-256 of run, round, configuration, model and options that clients train with.

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


@dataclass(frozen=True)
class EncryptedAgreed:
    """A sum and the site that opens it.

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
    round: Number
    size: Number
    degree: int
    opener: Site
    clients: Clients

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.parameters

    @property
    def parameters(self) -> CKKSParameters:
        """Of the scheme."""
        return CKKSParameters(degree=self.degree)

    def layout(self, sealed_key: bytes, trained_on: str) -> CKKSLayout:
        """Layout that binds messages to the run, the round, its key and the opening site.

        Args:
            sealed_key: of the run.
            trained_on: what clients were given to train from, see `agreed.trained_on`.
        """
        purpose = f"{self.run} {self.opener} {sha256(sealed_key).hexdigest()} {trained_on}".encode()
        return CKKSLayout(self.size, None, self.parameters, self.round, purpose)


@dataclass(frozen=True)
class EncryptedStage:
    """Options of an order of an encrypted sum.

    Attributes:
        stage: ``key``: make the run's key; ``encrypt``: send your clients' vectors; ``open``: decrypt the sum.
        sum: of which it is a stage.
        senders: whose vectors are in what is to be opened.
    """

    stage: Literal["key", "encrypt", "open"]
    sum: EncryptedAgreed
    senders: tuple[Sender, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def stage_of(order: Order) -> SecureStage | EncryptedStage:
    """Read the stage that an order of a sum asks for.

    Raises:
        ValueError: if it is none.
    """
    if "senders" in order.options:
        return read_document(EncryptedStage, dict(order.options))
    return read_document(SecureStage, dict(order.options))


_NONCE_SIZE = 12


class SumKey:
    """The shared key of a network's sites.

    Args:
        file: of 32 bytes.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "sum.key")
        >>> _ = file.write_bytes(bytes(range(32)))
        >>> key, parameters = SumKey(file), CKKSParameters()
        >>> sealed = key.new_run_key("a" * 32, parameters)
        >>> key.run_key(sealed, "a" * 32, parameters)  # doctest: +ELLIPSIS
        CKKSKeys(... secret bytes)
    """

    def __init__(self, file: Path) -> None:
        self._key = file.read_bytes()

    @property
    def fingerprint(self) -> str:
        """Equal for equal keys, 16 hexadecimal digits, which tell nothing else of them."""
        return self._part(b"fingerprint")[:8].hex()

    def new_run_key(self, run: str, parameters: CKKSParameters) -> bytes:
        """Return a new key for a run, sealed."""
        nonce = secrets.token_bytes(_NONCE_SIZE)
        secret = generate_keys(parameters).secret
        return nonce + self._cipher().encrypt(nonce, secret, _about(run, parameters))

    def run_key(self, sealed: bytes, run: str, parameters: CKKSParameters) -> CKKSKeys:
        """Return the key of a run.

        Raises:
            ValueError: if no site with this key has sealed it for this run.
        """
        try:
            nonce, content = sealed[:_NONCE_SIZE], sealed[_NONCE_SIZE:]
            secret = self._cipher().decrypt(nonce, content, _about(run, parameters))
        except (InvalidTag, ValueError):
            raise ValueError("the run's key is not one that a site has sealed for it") from None
        return CKKSKeys(self._part(b"tags"), secret)

    def _cipher(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._part(b"seal"))

    def _part(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose, "sha256")


def _about(run: str, parameters: CKKSParameters) -> bytes:
    return f"CKKS key of run {run}, {parameters}".encode()


_ADVICE = (
    "EncryptedMean needs one sum_key at all sites, which the server does not have: network init writes "
    "it into each site's folder; into older ones put one file of 32 random bytes, and its name into each "
    "site.yaml"
)


def check_encrypted(sites: Mapping[str, SiteFacts], agreed: EncryptedSum, size: int) -> None:
    """Refuse sites that do not share a key, or take no orders as large as the sum.

    Args:
        sites: what each says of itself.
        agreed: what the configuration says.
        size: numbers of the model that travel.

    Raises:
        ConfigurationError: naming them.
    """
    fingerprints = {site: told.sum_key for site, told in sites.items()}
    problems = [*_of_keys(fingerprints)]
    parameters = CKKSParameters(degree=agreed.degree)
    needed = -(-size // parameters.slots) * ciphertext_bytes(parameters)
    problems += [
        f"site {site} takes orders of {told.most_bytes} bytes at most, and the encrypted sum of {size} "
        f"numbers has {needed}: raise most_bytes in its site.yaml, or train fewer numbers"
        for site, told in sorted(sites.items())
        if told.most_bytes < needed
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _of_keys(fingerprints: Mapping[str, str]) -> Iterator[str]:
    if without := [site for site, found in sorted(fingerprints.items()) if not found]:
        yield f"sites without a sum_key: {', '.join(without)}. {_ADVICE}"
        return
    first, *others = sorted(fingerprints)
    if strange := [site for site in others if fingerprints[site] != fingerprints[first]]:
        yield f"{first} has another sum_key than {', '.join(strange)}. {_ADVICE}"
