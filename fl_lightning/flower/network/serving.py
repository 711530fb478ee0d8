"""A network's server, and a site: its resident process and Flower's node, or what hinders the node."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.control import Control, check_server, seconds_ahead, wait_for_port
from fl_lightning.flower.network.folder import NetworkFolder, SiteFolder
from fl_lightning.flower.network.programs import (
    SITE_PROCESS,
    app_runner,
    server_programs,
    site_programs,
)
from fl_lightning.flower.network.supervision import Ended, Program, Supervisor, backoff

_LOCAL = "127.0.0.1"
_START_SECONDS = 120.0


@contextmanager
def serving(
    network: NetworkFolder, supervisor: Supervisor, *, bind: str, control_port: int
) -> Iterator[Control]:
    """Run a network's server inside the block, with all sites' keys registered.

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


PAUSE = 15.0
# seconds between two clocks that Flower allows, see flwr.common.constant
_MOST_AHEAD, _MOST_BEHIND = 5.0, 300.0
_REFUSED = re.compile(r"\b2004\b|\b2001\b|PermissionDenied|FLEET_NODE|activat", re.IGNORECASE)


class NodeEnds:
    """Says why Flower's node has ended, once for each reason, and when it is to start again.

    Args:
        site: whose node.
        say: tells people.
    """

    def __init__(self, site: SiteFolder, say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        self._said = ""

    def __call__(self, ended: Ended) -> float:
        """Return the seconds until it is started again."""
        site = self._site
        try:
            check_server(site.server, site.folder / "ca.crt")
        except (ConnectionError, ValueError) as error:
            return self._told(str(error), PAUSE)
        ahead = seconds_ahead(site.server, site.folder / "ca.crt")
        if ahead is not None and not -_MOST_BEHIND < ahead < _MOST_AHEAD:
            return self._told(_about_clock(ahead), PAUSE)
        if _REFUSED.search(ended.words):
            return self._told(
                f"the server does not let {site.name} in: its key is not registered there, or a site "
                "with the same key is, or was within the last minute, connected",
                PAUSE,
            )
        log = site.folder / "log" / "supernode.log"
        return self._told(
            f"Flower's node has ended with code {ended.code}: see {log}", backoff(ended)
        )

    def _told(self, reason: str, pause: float) -> float:
        if reason != self._said:
            self._say(f"{reason}. Trying again every {pause:g} s.")
        self._said = reason
        return pause


def _about_clock(ahead: float) -> str:
    how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return (
        f"this machine's clock is {how}, and the server lets sites in that are less than "
        f"{_MOST_AHEAD:.0f} s ahead and {_MOST_BEHIND:.0f} s behind: set the clock, e.g. by NTP"
    )


def site_supervised(
    site: SiteFolder, say: Callable[[str], None], *, process: str = SITE_PROCESS
) -> list[Program]:
    """Return the programs of a site, with sentences for what hinders them.

    Args:
        site: which.
        say: tells people.
        process: the function of its folder that its process consists of, ``module:function``.
    """
    return site_programs(site, runtime_port=free_port(), process=process, again=NodeEnds(site, say))


def reach(site: SiteFolder, say: Callable[[str], None]) -> None:
    """Wait until a site's server answers.

    Args:
        site: which.
        say: tells people.

    Raises:
        ConfigurationError: if the server is not the one of the site's network.
    """
    said = ""
    while True:
        try:
            check_server(site.server, site.folder / "ca.crt")
        except ConnectionError as error:
            if str(error) != said:
                say(f"{error}. Trying again every {PAUSE:g} s.")
            said = str(error)
            time.sleep(PAUSE)
        else:
            return


def join(site: SiteFolder, say: Callable[[str], None]) -> None:
    """Run a site of a network until a signal.

    Args:
        site: which.
        say: tells people.

    Raises:
        ConfigurationError: if the server is not the one of the site's network.
    """
    reach(site, say)
    with Supervisor(site_supervised(site, say)) as supervisor:
        say(f"{site.name} runs, for the server at {site.server}. Logs: {site.folder / 'log'}")
        supervisor.watch(lambda: False)
