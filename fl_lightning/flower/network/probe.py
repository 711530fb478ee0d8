"""Why a site cannot reach its server, in a sentence, before Flower tries."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.folder import parse_address

_SECONDS = 10.0
_EXPIRED, _NOT_YET, _OTHER_HOST = 10, 9, 62


def check_server(address: str, certificate: Path) -> None:
    """Reach a server as a site does.

    Args:
        address: ``host:port``.
        certificate: of the authority that the site trusts.

    Raises:
        ConfigurationError: if the server is not the one of that authority.
        ConnectionError: if nobody answers, which may change.
    """
    host, port = parse_address(address)
    try:
        trust = ssl.create_default_context(cafile=certificate)
    except (ssl.SSLError, OSError):
        raise ConfigurationError(f"{certificate} is no certificate: ask for it again") from None
    try:
        with (
            socket.create_connection((host, port), _SECONDS) as plain,
            trust.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(_about_certificate(error, address, certificate)) from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
            raise ConfigurationError(
                f"{address} answers in plain HTTP, not HTTPS: is that the right port?"
            ) from None
        raise ConnectionError(f"{address} breaks off: {error.reason}") from None
    except OSError as error:
        raise ConnectionError(f"nobody answers at {address}: {error.strerror or error}") from None


def seconds_ahead(address: str, certificate: Path) -> float | None:
    """Return by how much this machine's clock is ahead of a server's, to the second; None if it is silent.

    Args:
        address: ``host:port``.
        certificate: of the authority that the site trusts.
    """
    host, port = parse_address(address)
    trust = ssl.create_default_context(cafile=certificate)
    connection = HTTPSConnection(host, port, timeout=_SECONDS, context=trust)
    try:
        connection.request("GET", "/")  # which the gate refuses, and says when
        told = parsedate_to_datetime(connection.getresponse().headers["Date"])
    except (OSError, HTTPException, TypeError, ValueError):
        return None
    finally:
        connection.close()
    return (datetime.now(UTC) - told).total_seconds()


def _about_certificate(error: ssl.SSLCertVerificationError, address: str, certificate: Path) -> str:
    if error.verify_code == _EXPIRED:
        return f"the certificate of {address} has expired: the server needs a new one"
    if error.verify_code == _NOT_YET:
        return f"the certificate of {address} is not valid yet: is this machine's clock right?"
    if error.verify_code == _OTHER_HOST or "match" in error.verify_message:
        return (
            f"the certificate of {address} is for other names: connect under one of those that "
            "network init was given"
        )
    return (
        f"the server at {address} is not the one whose authority is in {certificate}: it belongs to "
        "another network, or somebody poses as it"
    )
