"""Control of a server by Flower's own command: register keys, start and list runs.

`check_server` explains why a site cannot reach its server, before Flower tries.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import fl_lightning
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.folder import NetworkFolder, parse_address
from fl_lightning.flower.site.ledger import whole_file

_CONNECTION = "network"
_SECONDS = 60.0


def flower_environment(home: Path) -> dict[str, str]:
    """Return environment variables for Flower's programs: no telemetry, and this process's Python and package."""
    here, package = Path(sys.executable).parent, Path(fl_lightning.__file__).parents[1]
    paths = [str(package), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home),
        # Flower starts a process for every run, which would compile all it imports
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": os.pathsep.join(paths),  # the package that this process has as well
        "PATH": os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)]),
    }


def flower_command(name: str) -> str:
    """Return the path of one of Flower's commands."""
    return str(Path(sys.executable).with_name(name))


class Control:
    """Controls a network's Flower server from the server's machine: registers sites; starts, lists and stops runs.

    Args:
        network: network of the server.
        port: Flower's own port.

    Attributes:
        network: network of the server.
    """

    def __init__(self, network: NetworkFolder, port: int) -> None:
        self.network, self._home = network, network.server / "flower"
        self._home.mkdir(exist_ok=True)
        certificate = network.server / "ca.crt"
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\nroot-certificates = {json.dumps(str(certificate))}\n'
        )

    def register_sites(self) -> None:
        """Register the public keys of all sites with Flower, in place of keys that have changed.

        Raises:
            ConfigurationError: if Flower has a key already: a start was broken off before `nodes_file` was
                written. Flower does not tell the node of a key, and never takes one twice.
        """
        network = self.network
        keys = {n: (network.server / "keys" / f"{n}.pub").read_text() for n in network.sites}
        known = network.registered()
        for name, node in list(known.items()):
            if keys.get(name) != node["key"]:
                self._ask("supernode", "unregister", str(known.pop(name)["node"]), _CONNECTION)
                self._keep(known)
        for name in keys.keys() - known.keys():
            file = str(network.server / "keys" / f"{name}.pub")
            try:
                told = self._ask("supernode", "register", file, _CONNECTION, "--name", name)
            except ConfigurationError as error:
                if "already in use" not in str(error):
                    raise
                raise ConfigurationError(
                    f"Flower has the key of site {name} already, and {network.nodes_file} has not: a start "
                    f"of the server was broken off. Stop the server, delete {network.server / 'state.db'} "
                    "and that file, and start server and sites again"
                ) from None
            known[name] = {"node": int(told["node-id"]), "key": keys[name]}
            self._keep(known)

    def _keep(self, known: Mapping[str, Any]) -> None:
        with whole_file(self.network.nodes_file) as file:  # a run that starts may read it now
            file.write(json.dumps(known).encode())

    def nodes(self) -> list[Mapping[str, Any]]:
        """Return Flower's list of its nodes, one for each site."""
        return list(self._ask("supernode", "list", _CONNECTION)["nodes"])

    def runs(self) -> list[Mapping[str, Any]]:
        """Return Flower's list of its runs."""
        return list(self._ask("list", _CONNECTION)["runs"])

    def run(self, app: Path) -> str:
        """Start a run of a Flower app, and return the run's number."""
        return str(self._ask("run", str(app), _CONNECTION)["run-id"])

    def status_of(self, run: str) -> tuple[str, str]:
        """Return a run's status, as Flower names it, and details; ``unknown`` if Flower does not answer or list it."""
        try:
            found = [one for one in self.runs() if str(one.get("run-id")) == run]
        except ConfigurationError:
            found = []
        one = found[0] if found else {"status": "unknown"}
        return str(one["status"]), str(one.get("status-details", ""))

    def stop(self, run: str) -> None:
        """Stop a run at the server."""
        self._ask("stop", run, _CONNECTION)

    def _ask(self, *words: str) -> dict[str, Any]:
        command: Sequence[str] = [flower_command("flwr"), *words, "--format", "json"]
        done = subprocess.run(
            command,
            check=False,  # errors are JSON as well
            env={**os.environ, **flower_environment(self._home)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        try:
            told = json.loads(done.stdout)
        except ValueError:
            told = {"success": False, "error-message": (done.stdout + done.stderr)[-500:]}
        if not told.get("success"):
            said = " ".join(str(told.get("error-message", told)).split())
            raise ConfigurationError(f"Flower refuses {' '.join(words[:2])}: {said}")
        return dict(told)


_PROBE_SECONDS = 10.0
_EXPIRED, _NOT_YET, _OTHER_HOST = 10, 9, 62


def check_server(address: str, certificate: Path) -> float:
    """Connect to a server as a site does, and return by how many seconds this machine's clock is ahead of its clock.

    Args:
        address: ``host:port``.
        certificate: file with the certificate of the authority that the site trusts.

    Raises:
        ConfigurationError: if the server has no certificate of that authority.
        ConnectionError: if no server answers, which may change.
    """
    host, port = parse_address(address)
    try:
        trust = ssl.create_default_context(cafile=certificate)
    except (ssl.SSLError, OSError):
        raise ConfigurationError(f"{certificate} is no certificate: ask for it again") from None
    connection = HTTPSConnection(host, port, timeout=_PROBE_SECONDS, context=trust)
    try:
        connection.request("GET", "/")  # the gate refuses it, with a date
        told = parsedate_to_datetime(connection.getresponse().headers["Date"])
        # a date in no known zone is no date to subtract
        return (datetime.now(UTC) - told).total_seconds()
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
    except (HTTPException, TypeError, ValueError):
        raise ConnectionError(f"{address} does not answer as a server of a network does") from None
    finally:
        connection.close()


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
