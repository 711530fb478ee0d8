"""What a server lets in: a site's new key and not its old one, clocks that go about alike."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr")

from benchmarks.echo import serve_echo
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.certificates import make_site_key
from fl_lightning.flower.network.folder import SiteFolder, make_network
from fl_lightning.flower.network.serving import free_port, serving, site_programs
from fl_lightning.flower.network.supervision import Supervisor

LOCAL, SECONDS = "127.0.0.1", 180
ECHO = f"{serve_echo.__module__}:{serve_echo.__name__}"
pytestmark = pytest.mark.slow


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp") as name:  # for the path of a socket
        yield Path(name)


@pytest.fixture
def network(folder):
    made = make_network(folder / "network", f"{LOCAL}:{free_port()}", ["a"])
    file = made.site("a") / "site.yaml"
    told = yaml.safe_load(file.read_text()) | {"socket": str(folder / "s" / "socket")}
    file.write_text(yaml.safe_dump(told))
    return made


@contextlib.contextmanager
def served(network):
    """Have its server run; yield what asks it, and what keeps programs running."""
    port = free_port()
    with (
        Supervisor() as supervisor,
        serving(network, supervisor, bind=LOCAL, control_port=port) as control,
    ):
        yield control


@contextlib.contextmanager
def joined(network, said):
    """Have its site run."""
    programs = site_programs(SiteFolder.read(network.site("a")), said.append, process=ECHO)
    with Supervisor(programs):
        yield


def wait_for(is_over):
    until = time.monotonic() + SECONDS
    while not is_over() and time.monotonic() < until:
        time.sleep(1)
    return is_over()


def is_online(control):
    return [node["status"] for node in control.nodes()].count("online") == 1


def test_a_new_key_replaces_the_old_one(network, folder):
    said, key = [], network.site("a") / "key"
    with served(network) as control, joined(network, said):
        assert wait_for(lambda: is_online(control))
    old = key.read_bytes()
    key.unlink()
    make_site_key(key)  # as ssh-keygen does
    (network.server / "keys" / "a.pub").write_bytes(key.with_name("key.pub").read_bytes())
    with served(network) as control:
        with joined(network, said):
            assert wait_for(lambda: is_online(control))
        assert said == []
        key.write_bytes(old)
        with joined(network, said):
            assert wait_for(lambda: bool(said))
        # as if the server had been killed before it wrote down the node
        network.nodes_file.unlink()
        with pytest.raises(ConfigurationError, match="Flower has the key of site a"):
            control.register_sites()
    assert "does not let a in: its key is not registered there" in said[0]
    (network.server / "state.db").unlink()
    with served(network) as control:
        assert [node["status"] for node in control.nodes()] == ["registered"]


# A library that a process loads first, for which the day's time is later. faketime shifts the clock of
# timeouts as well, or breaks sleeping.
SKEW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *told) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, told);
    if (!failed && clock == CLOCK_REALTIME) told->tv_sec += atol(getenv("SKEW"));
    return failed;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs cc, Linux")
def test_a_clock_that_is_wrong_is_named_and_one_that_is_a_little_late_does_no_harm(network, folder):
    (folder / "skew.c").write_text(SKEW)
    library = str(folder / "skew.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "skew.c", "-ldl"], check=True)
    command = [sys.executable, "-m", "fl_lightning", "network", "join", "--folder"]
    command.append(str(network.site("a")))
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with served(network) as control:
        for skew, how in (
            ("60", r"6\d s ahead of"),
            ("-400", r"(39\d|400) s behind"),
            ("-60", ""),
        ):
            environment = {**os.environ, "LD_PRELOAD": library, "SKEW": skew}
            with subprocess.Popen(command, env=environment, **given) as site:
                try:
                    if not how:
                        assert wait_for(lambda: is_online(control))
                    else:
                        lines = [next(site.stdout), next(site.stdout)]
                        said = f"this machine's clock is {how} the server's"
                        assert re.search(said, lines[1]), lines
                finally:
                    site.terminate()
