"""The key that all sites share and the server never has, and what is made of it.

Sites have it from `network init`, a file of 32 bytes. For every run one site makes the key of CKKS and seals
it, so that the server can hand it to the others without reading it.

`check_encrypted` rejects, before any site trains, sites that do not share it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.site_facts import SiteFacts
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters
from fl_lightning.secure.encryption.ckks import CKKSKeys, ciphertext_bytes, generate_keys

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
