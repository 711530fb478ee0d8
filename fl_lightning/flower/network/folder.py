"""The folder of a network: certificates, keys, start scripts and a page of instructions.

README.md
network.yaml        the server's address, the sites
server/             ca.crt ca.key server.pem server.key superexec.secret start.sh, keys/<site>.pub
sites/<site>/       ca.crt key signing.key sum.key site.yaml own.yaml start.sh: all that a site gets
"""

from __future__ import annotations

import json
import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import read

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PUBLIC = re.compile(r"ecdsa-sha2-nistp384 [A-Za-z0-9+/=]{180,250}( .*)?")
_SIGNING = re.compile(r"[0-9a-f]{64}")
_NETWORK_FROM = "fl-lightning network init makes one"
_SITE_FROM = "Give the folder that the server's people sent"
_KEYS_FROM = "A site makes one with fl-lightning network keys"
LOCAL_HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class NetworkFolder:
    """Address and sites of a network, read from its folder.

    Attributes:
        folder: folder of the network.
        host: host name of the server, as sites reach it.
        port: port of the server, as sites reach it.
        sites: names of the sites.
    """

    folder: Path
    host: str
    port: int
    sites: tuple[str, ...]

    @property
    def server(self) -> Path:
        """Folder of the server."""
        return self.folder / "server"

    @property
    def nodes_file(self) -> Path:
        """File with each site's Flower node, and the public key under which the node is registered."""
        return self.server / "nodes.json"

    def registered(self) -> dict[str, dict[str, Any]]:
        """Return each site's Flower node and key from `nodes_file`; empty before the server has run."""
        return json.loads(self.nodes_file.read_text()) if self.nodes_file.exists() else {}

    def site(self, name: str) -> Path:
        """Return the folder of a site."""
        return self.folder / "sites" / name

    @staticmethod
    def read(folder: Path) -> NetworkFolder:
        """Read a network's address and sites from its folder.

        Raises:
            ConfigurationError: if the folder is not that of a network.
        """
        told = read(folder / "network.yaml", "folder: ", remedy=_NETWORK_FROM)
        host, port = parse_address(str(told.get("server")))
        return NetworkFolder(
            folder.resolve(), host, port, parse_sites(",".join(told.get("sites") or ()))
        )


@dataclass(frozen=True)
class SiteFolder:
    """Name, server and socket of a site, read from its folder.

    Attributes:
        folder: folder of the site.
        name: name of the site.
        server: address of the server, ``host:port``.
        socket: path of the socket of the resident process.
    """

    folder: Path
    name: str
    server: str
    socket: Path

    @staticmethod
    def read(folder: Path) -> SiteFolder:
        """Read a site's name, server and socket from its folder.

        Raises:
            ConfigurationError: if the folder is not that of a site.
        """
        told = read(folder / "site.yaml", "folder: ", remedy=_SITE_FROM)
        missing = {"name", "server", "socket"} - set(told)
        if missing:
            raise ConfigurationError(
                f"{folder / 'site.yaml'}: {', '.join(sorted(missing))} missing"
            )
        host, port = parse_address(str(told["server"]))
        (name,) = parse_sites(str(told["name"]))
        socket = Path(str(told["socket"])).expanduser()
        return SiteFolder(folder.resolve(), name, f"{host}:{port}", (folder / socket).absolute())


def parse_address(given: str) -> tuple[str, int]:
    """Split an address ``host:port`` into host and port.

    Raises:
        ConfigurationError: if the text is no such address.

    Example:
        >>> parse_address("fl.example.org:8443")
        ('fl.example.org', 8443)
    """
    host, _, port = given.rpartition(":")
    if "/" in host or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"server: give HOST:PORT, such as fl.example.org:8443, without https://; got {given}"
        )
    return host.strip("[]"), int(port)


def parse_sites(given: str) -> tuple[str, ...]:
    """Split a text with commas into names of sites.

    Raises:
        ConfigurationError: if a name is not valid, or given twice.

    Example:
        >>> parse_sites("hospital_a,hospital_b")
        ('hospital_a', 'hospital_b')
    """
    names = tuple(name.strip() for name in given.split(","))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"sites: {name!r} is not a valid name: use 1 to 32 of a-z, 0-9, _ and -, the first a letter or "
                "digit, such as hospital_a"
            )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"sites: a name is given twice in {given}")
    return names


def make_network(
    folder: Path,
    server: str,
    sites: Sequence[str],
    *,
    clients: Mapping[str, Sequence[int]] | None = None,
    hosts: Sequence[str] = (),
    keys: Mapping[str, PublicKeys] | None = None,
) -> NetworkFolder:
    """Write the folder of a new network: certificates, keys, start scripts and a folder for each site.

    Args:
        folder: new or empty folder.
        server: ``host:port``, as sites reach the server.
        sites: names of the sites.
        clients: global ids of each site's clients; None for one client per site, in order.
        hosts: further names and addresses of the server.
        keys: public keys that sites have made, see `make_keys`; None to make all keys here, with a key that
            all sites share.

    Raises:
        ConfigurationError: if the folder is not empty.
    """
    from fl_lightning.flower.network.certificates import (
        make_authority,
        make_server_certificate,
        write_private,
    )

    host, port = parse_address(server)
    sites = parse_sites(",".join(sites))
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"out: {folder} is not empty: keys are never overwritten")
    network = NetworkFolder(folder.resolve(), host, port, sites)
    (network.server / "keys").mkdir(parents=True)
    network.server.chmod(0o700)
    authority = make_authority(network.server)
    end = make_server_certificate(network.server, authority, [host, *hosts, *LOCAL_HOSTS])
    write_private(network.server / "superexec.secret", secrets.token_hex(32).encode())
    _write_start(network.server, "serve --folder ..")
    certificate = (network.server / "ca.crt").read_bytes()
    public = keys or {name: make_keys(network.site(name), name) for name in sites}
    peers = {name: public[name].signing for name in sites}
    sum_key = secrets.token_bytes(32)  # of all sites, in no folder of the server's
    for number, name in enumerate(sites):
        own = network.site(name)
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o700)
        (network.server / "keys" / f"{name}.pub").write_text(f"{public[name].key}\n")
        (own / "ca.crt").write_bytes(certificate)
        members = list((clients or {}).get(name, [number]))
        values = {
            # quoted where needed: 123, no and null are names of sites as well
            "name": yaml.safe_dump({"name": name}).strip(),
            "peers": textwrap.indent(yaml.safe_dump(peers, sort_keys=False), "  ").rstrip(),
            "site": name,
            "server": server,
            "clients": members,
        }
        told = _filled("site.yaml", values)
        if keys is None:
            write_private(own / "sum.key", sum_key)
        else:
            told = told.replace("sum_key:", "# sum_key:")
        (own / "site.yaml").write_text(told)
        (own / "own.yaml").write_text(_filled("own.yaml", {}))
        _write_start(own, "join --folder .")
    known = {"server": server, "sites": list(sites)}
    (folder / "network.yaml").write_text(yaml.safe_dump(known, sort_keys=False))
    listed = "\n".join(f"- `sites/{name}/`" for name in sites)
    values = {"server": server, "sites": listed, "site": sites[0], "end": f"{end:%Y-%m-%d}"}
    (folder / "README.md").write_text(_filled("readme.md", values))
    return network


@dataclass(frozen=True)
class PublicKeys:
    """Public keys of a site.

    Attributes:
        site: name of the site.
        key: key by which the server admits the site, in the format of OpenSSH.
        signing: key that verifies the site's messages in secure sums, 32 bytes in hexadecimal.
    """

    site: str
    key: str
    signing: str

    @staticmethod
    def read(file: Path) -> PublicKeys:
        """Read the file that ``network keys`` has written at a site.

        Raises:
            ConfigurationError: if the file is not one of these.
        """
        told = read(file, "keys: ", remedy=_KEYS_FROM)
        told = {name: str(value) for name, value in told.items()}
        forms = {"site": _NAME, "key": _PUBLIC, "signing": _SIGNING}
        if told.keys() != forms.keys() or not all(forms[n].fullmatch(told[n]) for n in forms):
            raise ConfigurationError(
                f"keys: {file} must have site, key and signing, as fl-lightning network keys writes them"
            )
        return PublicKeys(**told)


def make_keys(folder: Path, site: str) -> PublicKeys:
    """Write new private keys into the folder of a site, and return the public keys.

    Raises:
        ConfigurationError: if the folder has keys already.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fl_lightning.flower.network.certificates import make_site_key, write_private

    parse_sites(site)
    if existing := [name for name in ("key", "signing.key") if (folder / name).exists()]:
        raise ConfigurationError(
            f"folder: {folder / existing[0]} exists: keys are never overwritten"
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    signing = Ed25519PrivateKey.generate()
    make_site_key(folder / "key")
    write_private(folder / "signing.key", signing.private_bytes_raw())
    file = folder / "key.pub"
    public = signing.public_key().public_bytes_raw().hex()
    keys = PublicKeys(site, file.read_text().strip(), public)
    file.unlink()
    return keys


def _write_start(folder: Path, words: str) -> None:
    path = folder / "start.sh"
    path.write_text(f'#!/bin/sh\ncd "$(dirname "$0")" && exec fl-lightning network {words} "$@"\n')
    path.chmod(0o755)


def _filled(template: str, values: Mapping[str, object]) -> str:
    """Return the text of a template beside this file, with values in place of the names in braces."""
    text = Path(__file__).with_name(template).read_text()
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text
