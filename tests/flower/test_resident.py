"""The resident process: one order at a time, the same bytes for the same order, whatever dies."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.supervision import Program, Supervisor
from fl_lightning.flower.transport.channel import (
    ANSWER,
    LoopbackChannel,
    Lost,
    ask,
    bind_socket,
    receive,
    status,
)
from fl_lightning.flower.transport.resident import Resident

RESIDENT = [sys.executable, "-m", "fl_lightning.flower.transport.resident"]


@pytest.fixture
def folder():
    """A short path: sockets allow about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        yield Path(name)


@pytest.fixture
def resident(folder):
    residents = []

    def make(handler=lambda order: order, name="a"):
        residents.append(Resident(folder / name))
        if handler is not None:
            residents[-1].begin(handler)
        return folder / name

    make.all = residents
    yield make
    for one in residents:
        one.close()


def waited(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def echo_program(folder, name, **options):
    own = folder / f"{name}.site"
    own.mkdir()
    site = f"name: {name}\nserver: localhost:1\nclients: [0]\nsocket: {folder / name}\n"
    (own / "site.yaml").write_text(site)
    command = [*RESIDENT, "benchmarks.echo:serve_echo", str(own)]
    return Program(name, command, own / "log" / "out", **options)


def test_an_order_is_answered_and_large_ones_as_well(resident):
    path = resident(lambda order: order[::-1])
    large = os.urandom(5_000_000)
    assert ask(path, large, 20) == large[::-1]
    assert ask(path, b"", 20) == b""


def test_only_the_owner_can_reach_it(resident, folder):
    path = resident()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="others can open"):
        bind_socket(open_folder / "a")


def test_a_path_too_long_for_a_socket_is_refused_with_the_number(folder):
    with pytest.raises(ConfigurationError, match=r"socket: .* bytes, but the system allows 103"):
        Resident(folder / ("a" * 120))


def test_two_processes_cannot_have_one_socket(resident):
    resident()
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} serves"):
        resident()


def test_a_socket_left_behind_is_replaced(folder, resident):
    bind_socket(folder / "a").close()
    assert ask(resident(), b"x", 20) == b"x"


@pytest.mark.parametrize("order", [b"x", bytes(50_000_000)], ids=["answering", "reading"])
def test_a_process_that_hangs_in_the_middle_of_a_frame_is_silent(folder, order):
    """It sends half an answer, or reads half an order."""
    listening = bind_socket(folder / "a")

    def hang():
        connection = Connection(listening.accept()[0].detach())
        receive(connection) if len(order) == 1 else connection.recv_bytes()
        os.write(
            connection.fileno(), (1).to_bytes(4, "big") + ANSWER + (9).to_bytes(4, "big") + b"h"
        )
        time.sleep(20)

    threading.Thread(target=hang, daemon=True).start()
    began = time.monotonic()
    assert ask(folder / "a", order, 15, silence=0.3) == Lost("its process is silent")
    assert time.monotonic() - began < 5
    listening.close()


def test_one_order_at_a_time_and_two_askers_of_one_share_its_work(resident):
    at_work, most, calls = [0], [0], []

    def work(order):
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        calls.append(order)
        time.sleep(0.3)
        at_work[0] -= 1
        return order

    path = resident(work)
    outcomes = []
    threads = [
        threading.Thread(target=lambda order=order: outcomes.append(ask(path, order, 20)))
        for order in (b"x", b"x", b"y")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [b"x", b"x", b"y"]
    assert most == [1]
    assert sorted(calls) == [b"x", b"y"]


def test_an_error_stays_at_the_site_and_the_next_order_is_answered(resident, caplog):
    def fail(order):
        if order == b"bad":
            raise ValueError("patient 17")
        return order

    path = resident(fail)
    assert ask(path, b"bad", 20) == Lost("its process failed")
    assert "patient 17" in caplog.text
    assert ask(path, b"good", 20) == b"good"


def test_a_model_that_is_being_built_is_waited_for(resident):
    path = resident(None)
    assert status(path)["state"] == "starting"
    assert ask(path, b"x", 0.3) == Lost("no answer in time")
    threading.Timer(0.3, resident.all[0].begin, [lambda order: order]).start()
    assert ask(path, b"y", 20, silence=5) == b"y"


def test_work_longer_than_the_allowed_silence_is_fine_with_a_heartbeat(resident, monkeypatch):
    monkeypatch.setattr("fl_lightning.flower.transport.resident.HEARTBEAT", 0.1)
    path = resident(lambda order: time.sleep(1.0) or order)
    assert ask(path, b"x", 20, silence=0.5) == b"x"


def test_silence_is_noticed(resident, monkeypatch):
    monkeypatch.setattr("fl_lightning.flower.transport.resident.HEARTBEAT", 5.0)
    path = resident(lambda order: time.sleep(1.0) or order)
    assert ask(path, b"x", 20, silence=0.3) == Lost("its process is silent")


def test_nobody_at_the_socket(folder):
    assert ask(folder / "none", b"x", 20, patience=0.3) == Lost("not there")
    assert status(folder / "none") is None


def test_a_stranger_without_frames_does_no_harm(resident):
    path = resident()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    assert ask(path, b"x", 20) == b"x"


def test_sigterm_ends_the_process_cleanly(folder):
    program = echo_program(folder, "a")
    with subprocess.Popen(program.command) as process:
        waited(lambda: status(folder / "a"))
        asker = threading.Thread(target=ask, args=[folder / "a", b"sleep 60", 60])
        asker.start()
        waited(lambda: status(folder / "a")["state"] == "busy")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not (folder / "a").exists()
    log = program.log.with_name("resident.log").read_text()
    assert " | INFO | stopped by SIGTERM" in log


def test_a_process_that_is_killed_is_started_again_and_gets_the_order_again(folder):
    with Supervisor([echo_program(folder, "a", again=lambda ended: 0.2)]) as supervisor:
        first = supervisor.process("a")
        outcomes = []
        waited(lambda: status(folder / "a"))
        thread = threading.Thread(
            target=lambda: outcomes.append(ask(folder / "a", b"sleep 1.5", 60))
        )
        thread.start()
        waited(lambda: status(folder / "a")["state"] == "busy")
        os.kill(first, signal.SIGKILL)
        supervisor.watch(lambda: not thread.is_alive(), 60)
        assert outcomes == [b"sleep 1.5"]
        second = supervisor.process("a")
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_an_order_that_kills_every_process_is_given_up(folder):
    with Supervisor([echo_program(folder, "a", again=lambda ended: 0.1)]) as supervisor:
        outcomes = []
        thread = threading.Thread(target=lambda: outcomes.append(ask(folder / "a", b"die", 60)))
        thread.start()
        assert supervisor.watch(lambda: not thread.is_alive(), 60)
    assert outcomes == [Lost("its process died")]


def test_a_program_ends_with_its_supervisor_even_if_that_is_killed(folder):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fl_lightning.flower.network.supervision import Program, Supervisor\n"
        "with Supervisor([Program('p', ['sleep', '100'], Path(sys.argv[1]))]) as s:\n"
        "    print(s.process('p'), flush=True)\n"
        "    time.sleep(100)\n"
    )
    command = [sys.executable, "-c", script, str(folder / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        waited(lambda: "sleep" in Path(f"/proc/{child}/cmdline").read_text().split("\0")[0])
        process.kill()
    waited(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))


def _is_zombie(pid):
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_loopback_each_order_has_one_outcome(resident):
    sites = {name: resident(name=name) for name in "abc"}
    channel = LoopbackChannel(sites)
    assert channel.sites() == ["a", "b", "c"]
    for number in range(3):
        for name in sites:
            channel.send(name, f"{name}{number}".encode(), 20)
        came = []
        while len(came) < 3:
            came += channel.receive(20)
        assert sorted(came) == [(name, f"{name}{number}".encode()) for name in sites]
    assert channel.receive(0.05) == []


def test_loopback_a_site_that_has_not_answered_gets_nothing_new(resident):
    path = resident(lambda order: time.sleep(1.0) or order)
    channel = LoopbackChannel({"a": path})
    channel.send("a", b"x", 0.2)
    assert channel.sites() == []
    channel.send("a", b"y", 20)
    assert channel.receive(0.1) == [("a", Lost("busy with an earlier order"))]
    assert channel.receive(20) == [("a", Lost("no answer in time"))]
    channel.send("a", b"y", 20)  # it still works on the order that is lost
    assert channel.receive(20) == [("a", Lost("busy with an earlier order"))]
    assert waited(channel.sites) == ["a"]
    channel.send("a", b"y", 20)
    assert channel.receive(20) == [("a", b"y")]


def test_loopback_who_is_not_there_is_told(folder):
    channel = LoopbackChannel({"a": folder / "a"})
    assert channel.sites() == []
    channel.send("b", b"x", 1)
    assert channel.receive(1) == [("b", Lost("not there"))]
