"""A network's server, running."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.control import Control, wait_for_port
from fl_lightning.flower.network.folder import NetworkFolder
from fl_lightning.flower.network.programs import app_runner, server_programs
from fl_lightning.flower.network.supervision import Supervisor

_LOCAL = "127.0.0.1"
_START_SECONDS = 120.0


@contextmanager
def serving(
    network: NetworkFolder, supervisor: Supervisor, *, bind: str, control_port: int
) -> Iterator[Control]:
    """Have a network's server run, with all sites' keys registered.

    Args:
        network: whose.
        supervisor: keeps its programs running.
        bind: address to listen at for sites.
        control_port: of Flower's own interfaces, on this machine only.

    Raises:
        ConfigurationError: if a port is taken, or a program does not start.
    """
    for host, port in ((bind, network.port), (_LOCAL, control_port)):
        _check_free(host, port)
    for program in server_programs(network, bind=bind, control_port=control_port):
        supervisor.add(program)
    certificate = network.server / "ca.crt"
    wait_for_port(_LOCAL, control_port, certificate, _START_SECONDS, supervisor.look)
    control = Control(network, control_port)
    control.register_sites()
    supervisor.add(app_runner(network, control_port=control_port))
    file = _control_file(network)
    file.write_text(json.dumps({"port": control_port}))
    try:
        yield control
    finally:
        file.unlink(missing_ok=True)


def control_of(network: NetworkFolder) -> Control:
    """Return the control interface of a server that runs on this machine.

    Raises:
        ConfigurationError: if none runs.
    """
    file = _control_file(network)
    if not file.exists():
        raise ConfigurationError(
            f"folder: no server of {network.folder} runs on this machine: start "
            f"{network.server / 'start.sh'}"
        )
    return Control(network, int(json.loads(file.read_text())["port"]))


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as trial:
        trial.bind((_LOCAL, 0))
        return int(trial.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"{host}:{port} cannot be listened at: {error.strerror}. Is a server running already?"
            ) from None


def _control_file(network: NetworkFolder) -> Path:
    return network.server / "control.json"
