"""The programs of a network's server and of its sites, and a whole network on one machine (`demo`)."""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.certificates import write_private
from fl_lightning.flower.network.control import (
    Control,
    check_server,
    flower_command,
    flower_environment,
)
from fl_lightning.flower.network.folder import NetworkFolder, SiteFolder, make_network
from fl_lightning.flower.network.supervision import Program, ProgramEnd, Supervisor, backoff
from fl_lightning.flower.transport.grid import NAMES_VARIABLE

# functions that run as the resident process of a site, and as the server of a run
SITE_PROCESS = "fl_lightning.cli.network.site:site_process"
SERVER_RUN = "fl_lightning.cli.network.server:server_run"
_LOCAL = "127.0.0.1"
_START_SECONDS = 120.0


@contextmanager
def serving(
    network: NetworkFolder, supervisor: Supervisor, *, bind: str, control_port: int
) -> Iterator[Control]:
    """Run a network's server during a ``with`` block, with the public keys of all sites registered.

    Args:
        network: network of the server.
        supervisor: keeps the programs running.
        bind: address to listen at for sites.
        control_port: Flower's own port, open to this machine only.

    Raises:
        ConfigurationError: if a port is taken, or a program does not start.
    """
    for host, port in ((bind, network.port), (_LOCAL, control_port)):
        _check_free(host, port)
    folder, log = network.server, network.server / "log"
    environment = flower_environment(folder / "flower")
    secret = ("--superexec-auth-secret-file", str(folder / "superexec.secret"))
    certificates = [str(folder / name) for name in ("ca.crt", "server.pem", "server.key")]
    link = [
        flower_command("flower-superlink"),
        *("--ssl-ca-certfile", certificates[0]),
        *("--ssl-certfile", certificates[1]),
        *("--ssl-keyfile", certificates[2]),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        # so that a run outlives this process
        *("--isolation", "process", *secret),
        *("--database", str(folder / "state.db")),
        *("--host", _LOCAL, "--port", str(control_port)),
    ]
    gate = [
        *(sys.executable, "-m", "fl_lightning.flower.network.gate", bind, str(network.port)),
        *(f"https://{_LOCAL}:{control_port}", *certificates),
    ]
    runner = [
        flower_command("flower-superexec"),
        *("--runtime-api-address", f"{_LOCAL}:{control_port}"),
        *("--root-certificates", certificates[0], *secret),
    ]
    names = {NAMES_VARIABLE: str(network.nodes_file)}
    supervisor.add(Program("superlink", link, log / "superlink.log", environment))
    supervisor.add(Program("gate", gate, log / "gate.log", environment))
    wait_for_server(f"{_LOCAL}:{control_port}", folder / "ca.crt", 0.2, _START_SECONDS)
    control = Control(network, control_port)
    control.register_sites()
    supervisor.add(
        Program("superexec", runner, log / "superexec.log", environment | names, layer=1)
    )
    file = _control_file(network)
    file.write_text(json.dumps({"port": control_port}))
    try:
        yield control
    finally:
        file.unlink(missing_ok=True)


def wait_for_server(
    address: str,
    certificate: Path,
    pause: float,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda reason: None,
) -> None:
    """Wait until a server answers.

    Args:
        address: ``host:port``.
        certificate: file with the certificate of the authority.
        pause: seconds between two tries.
        seconds: longest time to wait.
        say: shows people why there is no answer.

    Raises:
        ConfigurationError: if another server answers, or none in time.
    """
    until, say = time.monotonic() + seconds, once_in_a_row(say)
    while True:
        try:
            check_server(address, certificate)
            return
        except ConnectionError as error:
            if time.monotonic() > until:
                raise ConfigurationError(str(error)) from None
            say(f"{error}. Trying again every {pause:g} s.")
            time.sleep(pause)


def once_in_a_row(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that shows a line to people, unless it equals the line shown last."""
    last = ""

    def say_once(line: str) -> None:
        nonlocal last
        if line != last:
            say(line)
        last = line

    return say_once


def control_of(network: NetworkFolder) -> Control:
    """Return the object that controls the network's server, which runs on this machine.

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
    """Return a free port of this machine."""
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


def why_node_ended(site: SiteFolder, say: Callable[[str], None], ended: ProgramEnd) -> float:
    """Say why the Flower node of a site has ended, and return the seconds until it is started again."""
    pause = PAUSE
    try:
        ahead = check_server(site.server, site.folder / "ca.crt")
    except (ConnectionError, ValueError) as error:
        reason = str(error)
    else:
        if not -_MOST_BEHIND < ahead < _MOST_AHEAD:
            reason = _about_clock(ahead)
        elif _REFUSED.search(ended.words):
            reason = (
                f"the server does not let {site.name} in: its key is not registered there, or a site "
                "with the same key is, or was within the last minute, connected"
            )
        else:
            log, pause = site.folder / "log" / "supernode.log", backoff(ended)
            reason = f"Flower's node has ended with code {ended.code}: see {log}"
    say(f"{reason}. Trying again every {pause:g} s.")
    return pause


def _about_clock(ahead: float) -> str:
    how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return (
        f"this machine's clock is {how}, and the server lets sites in that are less than "
        f"{_MOST_AHEAD:.0f} s ahead and {_MOST_BEHIND:.0f} s behind: set the clock, e.g. by NTP"
    )


def site_programs(
    site: SiteFolder, say: Callable[[str], None], *, process: str = SITE_PROCESS
) -> list[Program]:
    """Return the programs that a site runs: its resident process, Flower's node, and the runner of its client app.

    Args:
        site: the site.
        say: shows people why the Flower node has ended.
        process: function that runs as the resident process, ``module:function``; it gets the folder.
    """
    folder, port = site.folder, free_port()
    node = [
        flower_command("flower-supernode"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--superlink", site.server),
        *("--host", _LOCAL, "--port", str(port)),
        *("--node-config", f"site='{site.name}' socket='{site.socket}'"),
        *("--auth-supernode-private-key", str(folder / "key")),
        # so that it runs no app: `site_app` does
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(folder / "superexec.secret")),
    ]
    (folder / "superexec.secret").unlink(missing_ok=True)
    write_private(folder / "superexec.secret", secrets.token_hex(32).encode())
    module = "fl_lightning.flower.network.site_app"
    apps = [sys.executable, "-m", module, str(folder), f"{_LOCAL}:{port}"]
    log, common = folder / "log", flower_environment(folder / "flower")
    ends = partial(why_node_ended, site, once_in_a_row(say))
    command = [sys.executable, "-m", "fl_lightning.flower.transport.resident", process, str(folder)]
    return [
        Program(f"{site.name}: resident", command, log / "resident.out", common, layer=2),
        Program(f"{site.name}: supernode", node, log / "supernode.log", common, ends, layer=3),
        Program(f"{site.name}: apps", apps, log / "apps.log", common, layer=3),
    ]


def join(site: SiteFolder, say: Callable[[str], None]) -> None:
    """Wait until the server answers, then run a site's programs until a signal ends them.

    Raises:
        ConfigurationError: if the server is not the one of the site's network.
    """
    wait_for_server(site.server, site.folder / "ca.crt", PAUSE, say=say)
    with Supervisor(site_programs(site, say)) as supervisor:
        say(f"{site.name} runs, for the server at {site.server}. Logs: {site.folder / 'log'}")
        supervisor.wait()


@dataclass(frozen=True)
class Demo:
    """A whole network, server and sites, that runs on this machine.

    Attributes:
        network: folder of the network.
        sites: folders of the sites.
        supervisor: keeps all programs running.
        control: control interface of the server.
    """

    network: NetworkFolder
    sites: Sequence[SiteFolder]
    supervisor: Supervisor
    control: Control


@contextmanager
def demo(
    names: Sequence[str],
    say: Callable[[str], None],
    *,
    settings: Mapping[str, object] | None = None,
    clients: Mapping[str, Sequence[int]] | None = None,
    own: str = "",
    process: str = SITE_PROCESS,
) -> Iterator[Demo]:
    """Run a whole network on this machine inside the block, with certificates and keys.

    Args:
        names: names of the sites.
        say: shows a line to people.
        settings: further settings for every ``site.yaml``.
        clients: global ids of each site's clients; None for one client per site.
        own: options of every site, as YAML.
        process: function that runs as the resident process of a site, ``module:function``.
    """
    with _temporary_folder(say) as root, Supervisor() as supervisor:
        address = f"{_LOCAL}:{free_port()}"
        network = make_network(root / "network", address, names, clients=clients)
        for name in names if own else ():
            (network.site(name) / "own.yaml").write_text(own)
        say(f"certificates, and a key for each of {', '.join(names)}")
        with serving(network, supervisor, bind=_LOCAL, control_port=free_port()) as control:
            say(f"the server runs at {_LOCAL}:{network.port}, HTTPS; it knows the keys")
            sites = [_with_settings(network, site, root, settings or {}) for site in names]
            for site in sites:
                for program in site_programs(site, say, process=process):
                    supervisor.add(program)
            say(f"sites run, with three processes each: {', '.join(names)}")
            yield Demo(network, sites, supervisor, control)
        say("ending all processes")


@contextmanager
def _temporary_folder(say: Callable[[str], None]) -> Iterator[Path]:
    """Make a folder that is deleted after the block; if the block raises, its logs are copied elsewhere first."""
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        try:
            yield Path(name)
        except Exception:
            kept = Path(tempfile.mkdtemp(prefix="fl_lightning_demo_"))
            for logs in Path(name).rglob("log"):
                shutil.copytree(logs, kept / logs.parent.name)
            say(f"logs of the server and the sites: {kept}")
            raise


def _with_settings(
    network: NetworkFolder, name: str, root: Path, settings: Mapping[str, object]
) -> SiteFolder:
    """Write settings into a site's ``site.yaml``, with a socket in the temporary folder, and return the site."""
    file = network.site(name) / "site.yaml"
    told = yaml.safe_load(file.read_text())
    told["clients"] = {client: client for client in told["clients"]}  # all have the same data here
    told |= {"socket": str(root / f"s{network.sites.index(name)}" / "socket"), **settings}
    file.write_text(yaml.safe_dump(told, sort_keys=False))
    return SiteFolder.read(file.parent)
