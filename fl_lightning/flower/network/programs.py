"""The programs that a server and a site consist of, as they are started."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import fl_lightning
from fl_lightning.flower.network.certificates import write_private
from fl_lightning.flower.network.folder import NetworkFolder, SiteFolder
from fl_lightning.flower.network.supervision import Ended, Program, backoff
from fl_lightning.flower.transport.grid import NAMES_VARIABLE

# what a site's process and a run consist of: functions of the site's folder, and of the channel
SITE_PROCESS = "fl_lightning.cli.network.site:site_process"
SERVER_RUN = "fl_lightning.cli.network.server:server_run"
_LOCAL = "127.0.0.1"


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


def server_programs(network: NetworkFolder, *, bind: str, control_port: int) -> list[Program]:
    """Return what a server consists of, but for what runs its apps.

    Args:
        network: whose server it is.
        bind: address to listen at for sites.
        control_port: where Flower's own port is, on this machine only.
    """
    folder = network.server
    environment = flower_environment(folder / "flower")
    link = [
        flower_command("flower-superlink"),
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.pem")),
        *("--ssl-keyfile", str(folder / "server.key")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        # so that a run outlives this process
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(folder / "superexec.secret")),
        *("--database", str(folder / "state.db")),
        *("--host", _LOCAL, "--port", str(control_port)),
    ]
    gate = [
        *(sys.executable, "-m", "fl_lightning.flower.network.gate", bind, str(network.port)),
        f"https://{_LOCAL}:{control_port}",
        *(str(folder / name) for name in ("ca.crt", "server.pem", "server.key")),
    ]
    log = folder / "log"
    return [
        Program("superlink", link, log / "superlink.log", environment),
        Program("gate", gate, log / "gate.log", environment),
    ]


def app_runner(network: NetworkFolder, *, control_port: int) -> Program:
    """Return the program (flower-superexec) that runs the server's Flower apps.

    Args:
        network: whose server it is.
        control_port: where Flower's own port is.
    """
    folder = network.server
    command = [
        flower_command("flower-superexec"),
        *("--runtime-api-address", f"{_LOCAL}:{control_port}"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--superexec-auth-secret-file", str(folder / "superexec.secret")),
    ]
    environment = flower_environment(folder / "flower")
    environment[NAMES_VARIABLE] = str(names_file(network))
    return Program("superexec", command, folder / "log" / "superexec.log", environment, layer=1)


def names_file(network: NetworkFolder) -> Path:
    """Return the file that knows the node of each site.

    Args:
        network: whose server it is.
    """
    return network.server / "nodes.json"


def site_programs(
    site: SiteFolder,
    *,
    runtime_port: int,
    process: str = SITE_PROCESS,
    again: Callable[[Ended], float] = backoff,
    environment: Mapping[str, str] | None = None,
) -> list[Program]:
    """Return what a site consists of.

    Args:
        site: which.
        runtime_port: of Flower's own, on this machine only.
        process: the function of its folder that its process consists of, ``module:function``.
        again: how long after its end Flower's node is started again.
        environment: further variables of the resident process.
    """
    folder = site.folder
    node = [
        flower_command("flower-supernode"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--superlink", site.server),
        *("--host", _LOCAL, "--port", str(runtime_port)),
        *("--node-config", f"site='{site.name}' socket='{site.socket}'"),
        *("--auth-supernode-private-key", str(folder / "key")),
        # so that it runs no app: `site_app` does
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(folder / "superexec.secret")),
    ]
    (folder / "superexec.secret").unlink(missing_ok=True)
    write_private(folder / "superexec.secret", secrets.token_hex(32).encode())
    module = "fl_lightning.flower.network.site_app"
    apps = [sys.executable, "-m", module, str(folder), f"{_LOCAL}:{runtime_port}"]
    log, common = folder / "log", flower_environment(folder / "flower")
    command = [sys.executable, "-m", "fl_lightning.flower.transport.resident", process, str(folder)]
    return [
        Program(
            f"{site.name}: resident",
            command,
            log / "resident.out",
            {**common, **(environment or {})},
            layer=2,
        ),
        Program(
            f"{site.name}: supernode",
            node,
            log / "supernode.log",
            common,
            again,
            layer=3,
        ),
        Program(f"{site.name}: apps", apps, log / "apps.log", common, layer=3),
    ]
