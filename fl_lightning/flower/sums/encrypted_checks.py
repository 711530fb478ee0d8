"""What sites must have for encrypted sums, said before any of them trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.site_facts import SiteFacts
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters
from fl_lightning.secure.encryption.ckks import ciphertext_bytes
from fl_lightning.secure.scheme import EncryptedSum

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
