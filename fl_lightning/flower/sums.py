"""Settings of hidden sums over a network, secure or encrypted, and the keys of encrypted sums.

An order of a sum has a stage and the settings of the sum. A site compares the settings with its own.

Encrypted sums: sites share a key that the server never has, a file of 32 bytes from `network init`. In every
run, one site makes a CKKS key and encrypts it with the shared key, so that the server can pass it on unread.
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
from fl_lightning.flower.documents import check_fields, read_document
from fl_lightning.flower.messages import Clients, Order, Site
from fl_lightning.flower.server.remote_clients import SiteFacts
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters, Sender
from fl_lightning.secure.encryption.ckks import CKKSKeys, ciphertext_bytes, generate_keys
from fl_lightning.secure.protocol.session import Session, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum

# names of tensors in orders and answers
TO_CLIENT, MESSAGE, NONCE = "stage/sum/{}", "stage/sum/message", "stage/sum/nonce"
KEY, TOTAL, OPENED = "stage/sum/key", "stage/sum/total", "stage/sum/opened"
FEWEST = "fewest"
TRAINED_ON = "trained_on"  # a rule of a sum, beside those of `rules_of`


@dataclass(frozen=True)
class SecureStage:
    """Options of an order that asks a site for one stage of the secure-sum protocol.

    Attributes:
        stage: number of the `ProtocolStage`.
        session: settings of the secure sum.
        clients: global id of each client, in the order of their places in the session.
        sites: name of the site of each client.

    Raises:
        ValueError: if the numbers of clients differ, or a client is named twice.
    """

    stage: Annotated[int, partial(check_whole, most=4)]
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

    def directory(self, keys: Mapping[str, bytes]) -> dict[int, bytes]:
        """Return each client's public signing key, which is its site's, by the client's place in the session."""
        return {at: keys.get(site, b"") for at, site in enumerate(self.sites)}


def rules_of(secure_sum: SecureSum) -> dict[str, Any]:
    """Return the options of a secure sum as plain JSON, without the id of the run."""
    return {name: value for name, value in asdict(secure_sum).items() if name != "run"}


def trained_on(order: Order) -> str:
    """Return the SHA-256 of all that clients train with: an order's run, round, configuration, options and model.

    Every hidden sum is bound to this hash: vectors that were trained with different orders cannot be added.
    Else a server could have all clients but one train nothing, and read the update of that one.
    """
    about = {"run": order.run, "round": order.round, "configuration": order.configuration}
    return sha256(
        write("order", {**about, "options": dict(order.options)}, order.tensors)
    ).hexdigest()


def session_by(rules: Mapping[str, Any], given: Session) -> Session:
    """Return a secure sum's `Session` as the site's own options require it; an honest server sends an equal one.

    A server that chose thresholds, signatures or neighbours itself could read more than sums.

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
class EncryptedStage:
    """Options of an order that asks a site for one step of an encrypted sum: make a key, encrypt, or decrypt.

    Attributes:
        stage: ``key``: make the key of the run; ``encrypt``: send encrypted vectors; ``open``: decrypt the sum.
        opener: name of the site that decrypts the sum.
        clients: clients of the round that have trained.
        senders: clients whose vectors are in the sum to decrypt.
    """

    stage: Literal["key", "encrypt", "open"]
    opener: Site
    clients: Clients
    senders: tuple[Sender, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def stage_of(order: Order) -> SecureStage | EncryptedStage:
    """Read which stage of a secure or encrypted sum an order asks for.

    Raises:
        ValueError: if the options of the order describe no stage.
    """
    if "senders" in order.options:
        return read_document(EncryptedStage, dict(order.options))
    return read_document(SecureStage, dict(order.options))


_NONCE_SIZE = 12


class SumKey:
    """Secret key that all sites share and the server lacks; it encrypts the CKKS key of each run.

    Args:
        file: file with 32 bytes.

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
        """Hash of the shared key, 16 hexadecimal digits: equal for equal keys, while the key stays secret."""
        return self._part(b"fingerprint")[:8].hex()

    def new_run_key(self, run: str, parameters: CKKSParameters) -> bytes:
        """Return a new CKKS key for a run, encrypted with the shared key."""
        nonce = secrets.token_bytes(_NONCE_SIZE)
        secret = generate_keys(parameters).secret
        return nonce + self._cipher().encrypt(nonce, secret, _about(run, parameters))

    def run_key(self, sealed: bytes, run: str, parameters: CKKSParameters) -> CKKSKeys:
        """Decrypt a run's CKKS key, which a site with the same shared key has made by `new_run_key`.

        Raises:
            ValueError: if no site with the shared key has encrypted it for this run.
        """
        try:
            nonce, content = sealed[:_NONCE_SIZE], sealed[_NONCE_SIZE:]
            secret = self._cipher().decrypt(nonce, content, _about(run, parameters))
        except (InvalidTag, ValueError):
            raise ValueError(
                "the run's key was not encrypted for this run with the sites' sum_key"
            ) from None
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
    """Raise if sites have different sum keys or none, or if an encrypted sum is larger than orders they accept.

    Args:
        sites: facts about each site.
        agreed: options of the sum.
        size: number of coordinates of a vector.

    Raises:
        ConfigurationError: naming the sites.
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
