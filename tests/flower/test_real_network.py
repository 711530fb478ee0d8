"""A network of real processes: TLS, keys, a killed node, a killed server; nothing is left over."""

import json
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from flower.test_resident import waited

pytest.importorskip("flwr")

from fl_lightning.core.errors import RoundFailure
from fl_lightning.flower.network.folder import SiteFolder, make_network
from fl_lightning.flower.network.following import carry_out
from fl_lightning.flower.network.serving import demo, site_programs
from fl_lightning.flower.network.supervision import Supervisor
from fl_lightning.flower.transport.apps import write_app

pytestmark = pytest.mark.slow


def processes_with(words):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if words in command:
            found.append(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def short_folders(monkeypatch):
    """Sockets allow about a hundred bytes."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")


ECHO = "benchmarks.echo"


def test_rounds_over_tls_with_a_killed_node_and_a_killed_server():
    said = []

    def say(line):
        said.append(line)
        if line.startswith("round 0"):
            os.kill(running.supervisor.process("b: supernode"), signal.SIGKILL)
        if line.startswith("round 1"):
            killed.set()
            os.kill(running.supervisor.process("superlink"), signal.SIGKILL)

    killed = threading.Event()
    with demo(["a", "b", "c"], print, process=f"{ECHO}:serve_echo") as running:
        folder = str(running.network.folder)
        options = {"sites": 3, "rounds": 3, "ttl": 60}
        carry_out(running.control, say, options=options, run=f"{ECHO}:exchange")
        apps = Path(f"/proc/{running.supervisor.process('a: apps')}/stat").read_text()
        pids = processes_with(folder)
        assert len(pids) >= 8  # the killed node may be between two tries
    assert killed.is_set()
    rounds = [line for line in said if line.startswith("round")]
    assert len(rounds) == 3
    assert all(f"{name} answered" in rounds[0] for name in "abc")
    assert "a answered" in rounds[1]
    assert "c answered" in rounds[1]
    assert "a answered" in rounds[2]  # by a run that the server's death did not end
    assert "all rounds done" in said
    ticks = sum(map(int, apps.rpartition(")")[2].split()[13:15]))  # of its children that have ended
    assert ticks / os.sysconf("SC_CLK_TCK") < 2  # Flower is not imported for each of three messages
    assert not processes_with(folder)
    assert not Path(folder).exists()


STRANGE_CLIENT = """
from pathlib import Path
from flwr.clientapp import ClientApp

Path({file!r}).write_text("run by a site")
app = ClientApp()

@app.query()
def query(message, context):
    raise RuntimeError("read your keys")
"""
STRANGE_SERVER = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        pass
    content = RecordDict({{"a": ConfigRecord({{"b": 1}})}})
    asked = [Message(content, dst_node_id=node, message_type="query") for node in nodes]
    [reply] = grid.send_and_receive(asked, timeout=60)
    Path({file!r}).write_text(reply.error.reason if reply.has_error() else "followed")
"""


def test_another_app_of_the_servers_runs_at_no_site():
    """Whoever had a shell at the server had a site run any code as its user, and its log said nothing."""
    with demo(["a"], print, process=f"{ECHO}:serve_echo") as running:
        options = {"sites": 1, "rounds": 1, "ttl": 60}
        carry_out(running.control, print, options=options, run=f"{ECHO}:exchange")  # ours
        folder = running.sites[0].folder
        app, file = folder.parent / "app", folder.parent / "written"
        write_app(app, "a:b", {}, "")
        code = app / "fl_lightning_run"
        (code / "client_app.py").write_text(STRANGE_CLIENT.format(file=str(file)))
        told = folder.parent / "told"
        (code / "server_app.py").write_text(STRANGE_SERVER.format(file=str(told)))
        running.control.run(app)
        assert waited(told.exists, 150)
        assert "runs no client app but that of fl_lightning" in told.read_text()
        lines = [json.loads(x) for x in (folder / "log" / "audit.jsonl").read_text().splitlines()]
    assert not file.exists()
    assert [x["refusal"] for x in lines if x["kind"] == "app"] == [
        "policy: its client app fl_lightning_run.client_app is not that of fl_lightning"
    ]


def test_a_demo_that_fails_keeps_its_logs_and_says_where():
    said = []
    with pytest.raises(RoundFailure), demo(["a"], said.append, process=f"{ECHO}:serve_echo") as it:
        carry_out(it.control, said.append, options={"sites": 1}, run=f"{ECHO}:nothing_of_this_name")
    [kept] = [Path(line.partition(": ")[2]) for line in said if line.startswith("logs of the ser")]
    logs = [path.read_text() for path in (kept / "server").glob("*.log")]
    assert any("nothing_of_this_name" in log for log in logs)
    assert (kept / "a" / "resident.log").exists()
    assert not it.network.folder.exists()


def test_who_is_not_let_in_is_told_why():
    said = []
    with demo(["a"], print) as running, tempfile.TemporaryDirectory(prefix="fl-") as name:
        other = make_network(Path(name, "other"), "127.0.0.1:1", ["b"]).site("b")
        file = other / "site.yaml"
        file.write_text(
            f"name: b\nserver: {running.sites[0].server}\nclients: [0]\nsocket: {name}/s/socket\n"
        )
        (other / "ca.crt").write_bytes((running.network.server / "ca.crt").read_bytes())
        with Supervisor(site_programs(SiteFolder.read(other), said.append)):
            assert waited(lambda: said, 60)
        assert "does not let b in: its key is not registered there" in said[0]
        said.clear()
        (other / "key").write_bytes((running.sites[0].folder / "key").read_bytes())
        with Supervisor(site_programs(SiteFolder.read(other), said.append)):
            assert waited(lambda: said, 60)
        assert "with the same key is" in said[0]
