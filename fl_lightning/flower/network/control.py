"""Flower's own command, called by the server's people: register keys, start runs, list both.

`check_server` says in a sentence why a site cannot reach its server, before Flower tries.
"""

from __future__ import annotations

import json
import os
import socket
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
from fl_lightning.core.processes import tied
from fl_lightning.flower.network.folder import NetworkFolder, parse_address

_CONNECTION = "network"
_SECONDS = 60.0


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: nothing is told to anybody, ours are found.

    Args:
        home: where Flower keeps what it keeps.
    """
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
    """Return the path of one of Flower's commands.

    Args:
        name: of the command.
    """
    return str(Path(sys.executable).with_name(name))


class Control:
    """Flower's control interface of a network's server, on the server's machine.

    Args:
        network: whose server it is.
        port: where Flower's own port is.

    Attributes:
        network: whose server it is.
    """

    def __init__(self, network: NetworkFolder, port: int) -> None:
        self.network, self._home = network, network.server / "flower"
        self._home.mkdir(exist_ok=True)
        certificate = network.server / "ca.crt"
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\nroot-certificates = {json.dumps(str(certificate))}\n'
        )

    def register_sites(self) -> dict[str, int]:
        """Register the keys of all sites, take back those that are another now, return each site's node."""
        server = self.network.server
        names, keys = self.network.names_file, server / "registered.json"
        nodes: dict[str, int] = json.loads(names.read_text()) if names.exists() else {}
        known: dict[str, str] = json.loads(keys.read_text()) if keys.exists() else {}
        present = {n: (server / "keys" / f"{n}.pub").read_text() for n in self.network.sites}
        for name in list(nodes):
            if present.get(name) != known.get(name, present.get(name)):
                self._ask("supernode", "unregister", str(nodes.pop(name)), _CONNECTION)
                names.write_text(json.dumps(nodes))
        for name in present.keys() - nodes.keys():
            file = str(server / "keys" / f"{name}.pub")
            told = self._ask("supernode", "register", file, _CONNECTION, "--name", name)
            nodes[name] = int(told["node-id"])
            names.write_text(json.dumps(nodes))
        keys.write_text(json.dumps(present))
        return nodes

    def nodes(self) -> list[Mapping[str, Any]]:
        """Nodes as Flower lists them."""
        return list(self._ask("supernode", "list", _CONNECTION)["nodes"])

    def runs(self) -> list[Mapping[str, Any]]:
        """Runs as Flower lists them."""
        return list(self._ask("list", _CONNECTION)["runs"])

    def run(self, app: Path) -> subprocess.Popen[str]:
        """Start a run, and return the command that tells of it until its end.

        Args:
            app: its folder.
        """
        return self._streaming(["run", str(app), _CONNECTION, "--stream"])

    def follow(self, run: str) -> subprocess.Popen[str]:
        """Return a command that tells of a run until its end.

        Args:
            run: its number.
        """
        return self._streaming(["log", run, _CONNECTION, "--stream"])

    def status_of(self, run: str) -> tuple[str, str]:
        """A run's status in Flower's words, and its details; unknown while the server does not answer.

        Args:
            run: its number.
        """
        try:
            found = [one for one in self.runs() if str(one.get("run-id")) == run]
        except ConfigurationError:
            found = []
        one = found[0] if found else {"status": "unknown"}
        return str(one["status"]), str(one.get("status-details", ""))

    def _streaming(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            tied([flower_command("flwr"), *words]),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def stop(self, run: str) -> None:
        """End a run.

        Args:
            run: its number.
        """
        self._ask("stop", run, _CONNECTION)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **flower_environment(self._home), "COLUMNS": "200"}

    def _ask(self, *words: str) -> dict[str, Any]:
        command: Sequence[str] = [flower_command("flwr"), *words, "--format", "json"]
        done = subprocess.run(
            command,
            check=False,  # it says what is wrong in JSON
            env=self._environment,
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
            socket.create_connection((host, port), _PROBE_SECONDS) as plain,
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
    connection = HTTPSConnection(host, port, timeout=_PROBE_SECONDS, context=trust)
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
