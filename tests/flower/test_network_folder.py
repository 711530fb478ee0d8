"""Certificates, keys and the folder of a network; who is let in, and what is said to others."""

import contextlib
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest
import yaml

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fl_lightning.cli import main
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.control import check_server
from fl_lightning.flower.network.folder import (
    NetworkFolder,
    SiteFolder,
    make_network,
    parse_address,
)
from fl_lightning.flower.policy import read_policy


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return make_network(
        tmp_path_factory.mktemp("n") / "net", "localhost:8443", ["a", "b"], clients={"b": [3, 4]}
    )


def _answer(server, context, zone="GMT"):
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            connection.recv(1000)
            then = formatdate(time.time() - 60, usegmt=True).replace("GMT", zone)
            connection.sendall(f"HTTP/1.1 404 Not Found\r\nDate: {then}\r\n\r\n".encode())
            connection.close()


@pytest.fixture
def listening():
    """A server that speaks TLS with some certificate, or plain HTTP."""
    opened = []

    def listen(folder=None, host="127.0.0.1", zone="GMT"):
        server = socket.create_server((host, 0))
        opened.append(server)
        context = None
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.pem", folder / "server.key")

        threading.Thread(target=_answer, args=[server, context, zone], daemon=True).start()
        return server.getsockname()[1]

    yield listen
    for server in opened:
        server.close()


def test_a_site_gets_its_own_key_and_nothing_of_others(network):
    names = {path.name for path in network.site("a").iterdir()}
    own = {"key", "signing.key", "sum.key", "site.yaml", "own.yaml", "start.sh"}
    assert names == {"ca.crt", *own}
    private = [network.server / name for name in ("ca.key", "server.key", "superexec.secret")]
    private += [network.site("a") / "key", network.site("a") / "sum.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE(network.server.stat().st_mode) == 0o700
    assert stat.S_IMODE(network.site("a").stat().st_mode) == 0o700
    keys = {}
    for name in ("a", "b"):
        private = load_ssh_private_key((network.site(name) / "key").read_bytes(), None)
        public = load_ssh_public_key((network.server / "keys" / f"{name}.pub").read_bytes())
        assert private.public_key() == public
        keys[name] = private.private_numbers().private_value
    assert keys["a"] != keys["b"]


def test_all_sites_share_a_key_that_the_server_does_not_have(network):
    [shared] = {(network.site(name) / "sum.key").read_bytes() for name in ("a", "b")}
    assert len(shared) == 32
    written = [path.read_bytes() for path in network.server.rglob("*") if path.is_file()]
    assert written
    assert not any(shared in each or shared.hex().encode() in each for each in written)
    policies = [read_policy(network.site(name) / "site.yaml") for name in "ab"]
    assert len({policy.sum_key_fingerprint for policy in policies}) == 1


def test_keys_that_sites_have_made_stay_with_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        main(["network", "keys", "--folder", name, "--site", name])
        assert {path.name for path in Path(name).iterdir()} == {
            "key",
            "signing.key",
            f"{name}.public",
        }
    words = ["--out", "net", "--server", "localhost:8443", "--public_keys", "a/a.public,b/b.public"]
    main(["network", "init", *words])
    made = NetworkFolder.read(Path("net"))
    assert made.sites == ("a", "b")
    private = [Path(name, file).read_bytes() for name in "ab" for file in ("key", "signing.key")]
    written = [path.read_bytes() for path in Path("net").rglob("*") if path.is_file()]
    assert not any(each in one or each.hex().encode() in one for each in private for one in written)
    sent = {path.name for path in made.site("a").iterdir()}
    assert sent == {"ca.crt", "site.yaml", "own.yaml", "start.sh"}
    shutil.copytree(made.site("a"), "a", dirs_exist_ok=True)
    policy = read_policy(Path("a", "site.yaml"))
    assert policy.peers["a"] == policy.public_key != policy.peers["b"]
    assert (policy.sum_key, policy.public_key in capsys.readouterr().out) == (None, True)
    key = load_ssh_private_key(Path("a", "key").read_bytes(), None)
    public = load_ssh_public_key((made.server / "keys" / "a.pub").read_bytes())
    assert key.public_key() == public
    with pytest.raises(SystemExit, match="a/key exists: keys are never overwritten"):
        main(["network", "keys", "--folder", "a", "--site", "a"])


NO_HALVES = {
    "a/key": "keys: a/key is not valid: it contains no options, which are written as name: value. A site ",
    "nowhere": "keys: nowhere cannot be read: No such file or directory. A site makes one",
    "a/a.public --sites a": "either --sites, the names of the sites, or --public_keys",
}


def test_what_is_no_public_half_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["network", "keys", "--folder", "a", "--site", "a"])
    words = ["network", "init", "--out", "net", "--server", "localhost:8443", "--public_keys"]
    for given, said in NO_HALVES.items():
        with pytest.raises(SystemExit) as ended:
            main([*words, *given.split()])
        assert said in " ".join(str(ended.value).split())
        assert not Path("net").exists()


def test_the_certificate_has_the_names_of_the_server(network):
    certificate = x509.load_pem_x509_certificate((network.server / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_a_site_may_have_a_name_that_yaml_reads_as_a_number(tmp_path):
    sites = ("123", "no", "null", "1e3")
    network = make_network(tmp_path / "net", "localhost:8443", sites)
    policies = [read_policy(network.site(name) / "site.yaml") for name in sites]
    assert [policy.name for policy in policies] == [*policies[0].peers] == [*sites]
    assert NetworkFolder.read(network.folder).sites == sites


def test_the_folder_is_read_as_it_was_written(network):
    read = NetworkFolder.read(network.folder)
    assert read == network
    assert yaml.safe_load((network.site("b") / "site.yaml").read_text())["clients"] == [3, 4]
    site = SiteFolder.read(network.site("b"))
    assert (site.name, site.server) == ("b", "localhost:8443")
    assert site.socket == Path.home() / ".fl-lightning/b/socket"
    for path in (network.server / "start.sh", network.site("a") / "start.sh"):
        assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
        assert path.stat().st_mode & stat.S_IXUSR
    with pytest.raises(ConfigurationError, match="keys are never overwritten"):
        make_network(network.folder, "localhost:8443", ["a"])
    readme = (network.folder / "README.md").read_text()
    assert "localhost:8443" in readme
    assert "{" not in readme


def test_what_is_no_address_or_name_is_refused(tmp_path):
    for given in ("foo", "https://foo:1", "foo:0", "foo:99999", ":1", "foo:x"):
        with pytest.raises(ConfigurationError, match="give HOST:PORT"):
            parse_address(given)
    for sites in (["A"], ["a", "a"], [""], ["a b"], ["../a"]):
        with pytest.raises(ConfigurationError, match=r"^sites: "):
            make_network(tmp_path / "n", "localhost:8443", sites)


def test_the_right_server_is_reached_and_others_are_told_apart(network, listening, tmp_path):
    other = make_network(tmp_path / "other", "localhost:8443", ["a"])
    certificate = network.site("a") / "ca.crt"
    port = listening(network.server)
    assert 59 < check_server(f"127.0.0.1:{port}", certificate) < 75
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]
    elsewhere = listening(network.server, "127.0.0.2")
    for address, error, said in (
        (f"127.0.0.1:{nobody}", ConnectionError, "nobody answers"),  # which may change
        # a date without a zone is that of another server
        (
            f"127.0.0.1:{listening(network.server, zone='-0000')}",
            ConnectionError,
            "does not answer as a server of a network",
        ),
        (
            f"127.0.0.1:{listening(other.server)}",
            ConfigurationError,
            "another network, or somebody poses as it",
        ),
        (f"127.0.0.2:{elsewhere}", ConfigurationError, "is for other names"),
        (f"127.0.0.1:{listening()}", ConfigurationError, "plain HTTP"),
    ):
        with pytest.raises(error, match=said):
            check_server(address, certificate)


def test_the_thin_app_needs_neither_pytorch_nor_lightning():
    pytest.importorskip("flwr")
    script = (
        "import sys\n"
        "from fl_lightning.flower import make_client_app\n"
        "make_client_app()\n"
        "heavy = {'torch', 'lightning', 'torchvision', 'sklearn', 'timm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
