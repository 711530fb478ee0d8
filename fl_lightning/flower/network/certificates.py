"""Keys and certificates of a network: an authority, the server's certificate, a key for each site.

Elliptic curves throughout (P-384), keys without a password in files that only their owner can read.
Flower wants a site's key as OpenSSH writes it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from fl_lightning.core.errors import ConfigurationError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigurationError(
        "certificates need cryptography: install fl-lightning[flower]"
    ) from error

_AUTHORITY_DAYS, _SERVER_DAYS = 3650, 825
_CLOCKS = timedelta(hours=1)  # clocks of sites may be slow by this


class Authority(NamedTuple):
    """Certificate authority of a network, which signs the server's certificate.

    Attributes:
        key: private key.
        certificate: certificate that sites trust.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def make_authority(folder: Path) -> Authority:
    """Make a new certificate authority, and write its ``ca.key`` and ``ca.crt``."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fl-lightning network")])
    certificate = (
        _builder(name, name, key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    return Authority(key, certificate)


def make_server_certificate(folder: Path, authority: Authority, hosts: Sequence[str]) -> datetime:
    """Write the server's key and certificate, ``server.key`` and ``server.pem``, and return when it expires.

    Args:
        folder: existing folder.
        authority: authority that signs the certificate.
        hosts: names and addresses under which sites reach the server.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    signer = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    certificate = (
        _builder(name, authority.certificate.subject, key, _SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer.value),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([_alternative(h) for h in dict.fromkeys(hosts)]),
            critical=False,
        )
        .sign(authority.key, hashes.SHA384())
    )
    write_private(folder / "server.key", _pem(key))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    return certificate.not_valid_after_utc


def make_site_key(path: Path) -> None:
    """Write a site's new key in OpenSSH's format: the private half at a path, the public half at ``.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
