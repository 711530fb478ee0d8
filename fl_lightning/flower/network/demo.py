"""A whole network on one machine: a server and sites as real processes, in folders that go at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from fl_lightning.flower.network.control import Control
from fl_lightning.flower.network.folder import NetworkFolder, SiteFolder, make_network
from fl_lightning.flower.network.serving import SITE_PROCESS, free_port, serving, site_programs
from fl_lightning.flower.network.supervision import Supervisor

_LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Demo:
    """A network that runs on this machine.

    Attributes:
        network: its folder.
        sites: their folders.
        supervisor: keeps all its programs running.
        control: of its server.
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
    """Set up a network on this machine, with certificates and keys, and take it down again.

    Args:
        names: of the sites.
        say: tells people.
        settings: that all ``site.yaml`` have besides.
        clients: which clients of the federation each site has; one each if None.
        own: layer of every site, as YAML.
        process: what a site's process consists of, ``module:function``.
    """
    with _passing_folder(say) as root, Supervisor() as supervisor:
        address = f"{_LOCAL}:{free_port()}"
        network = make_network(root / "network", address, names, clients=clients)
        for name in names if own else ():
            (network.site(name) / "own.yaml").write_text(own)
        say(f"certificates, and a key for each of {', '.join(names)}")
        with serving(network, supervisor, bind=_LOCAL, control_port=free_port()) as control:
            say(f"the server runs at {_LOCAL}:{network.port}, HTTPS; it knows the keys")
            sites = [_settled(network, site, root, settings or {}) for site in names]
            for site in sites:
                for program in site_programs(site, say, process=process):
                    supervisor.add(program)
            say(f"{len(sites)} sites run, three processes each")
            with supervisor.in_background():
                yield Demo(network, sites, supervisor, control)
        say("ending all processes")


@contextmanager
def _passing_folder(say: Callable[[str], None]) -> Iterator[Path]:
    """A folder that goes at the end, except for its logs if something has failed."""
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        try:
            yield Path(name)
        except Exception:
            kept = Path(tempfile.mkdtemp(prefix="fl_lightning_demo_"))
            for logs in Path(name).rglob("log"):
                shutil.copytree(logs, kept / logs.parent.name)
            say(f"logs of the server and the sites: {kept}")
            raise


def _settled(
    network: NetworkFolder, name: str, root: Path, settings: Mapping[str, object]
) -> SiteFolder:
    """Give a site a socket in the folder that goes at the end, and its settings."""
    file = network.site(name) / "site.yaml"
    told = yaml.safe_load(file.read_text())
    told["clients"] = {client: client for client in told["clients"]}  # all have the same data here
    told |= {"socket": str(root / f"s{network.sites.index(name)}" / "socket"), **settings}
    file.write_text(yaml.safe_dump(told, sort_keys=False))
    return SiteFolder.read(file.parent)
