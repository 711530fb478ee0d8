"""The resident process: one order at a time, an answer to each, whatever dies."""

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
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network import supervision
from fl_lightning.flower.network.supervision import Program, Supervisor
from fl_lightning.flower.transport import resident as resident_module
from fl_lightning.flower.transport.channel import LoopbackChannel, ask, state_of
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
        residents.append(Resident(folder / name, handler))
        return folder / name

    yield make
    for one in residents:
        one.close()


@pytest.fixture
def echo(folder):
    """A program at a socket of its own; what is asked of it, in a thread."""
    own = folder / "a.site"
    own.mkdir()
    site = f"name: a\nserver: localhost:1\nclients: [0]\nsocket: {folder / 'a'}\n"
    (own / "site.yaml").write_text(site)
    command = [*RESIDENT, "benchmarks.echo:serve_echo", str(own)]
    with ThreadPoolExecutor() as threads:
        program = Program("a", command, own / "log" / "out", again=lambda ended: 0.1)
        yield program, lambda order: threads.submit(ask, folder / "a", order, 60)


def waited(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def test_only_the_owner_can_reach_it_and_one_process_has_it(resident, folder):
    assert ask(folder / "a", b"x", 20) is None
    assert state_of(folder / "a") is None
    with socket.socket(socket.AF_UNIX) as left_behind:  # which is replaced
        left_behind.bind(str(folder / "a"))
    path = resident()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} serves"):
        resident()
    assert ask(path, b"x", 20) == b"x"
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="other users can open"):
        resident(name="open/a")
    with pytest.raises(ConfigurationError, match=r"socket: .* bytes, but the system allows 103"):
        resident(name="a" * 120)


def test_one_order_at_a_time_and_none_that_nobody_waits_for(resident):
    at_work, calls = threading.Lock(), []

    def work(order):
        calls.append(order)
        assert at_work.acquire(blocking=False)
        time.sleep(0.5)
        at_work.release()
        return order

    path = resident(work)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask, path, b"x", 20)
        assert waited(lambda: state_of(path) == "busy")
        assert ask(path, b"given up", 0.1) is None
        assert [each.result() for each in (first, threads.submit(ask, path, b"y", 20))] == [
            b"x",
            b"y",
        ]
    assert calls == [b"x", b"y"]
    assert state_of(path) == "idle"


def test_orders_are_answered_and_an_error_stays_at_the_site(resident, caplog):
    def fail(order):
        if order == b"bad":
            raise ValueError("patient 17")
        return order[::-1]

    path = resident(fail)
    assert ask(path, b"bad", 20) is None
    assert "patient 17" in caplog.text
    large = os.urandom(5_000_000)
    assert ask(path, large, 20) == large[::-1]
    assert ask(path, b"", 20) == b""


@pytest.mark.parametrize("size", [1, 5_000_000])
def test_a_process_that_hangs_has_no_answer(size, folder):
    """A large order fills the socket's buffer, and nobody reads it."""
    with socket.socket(socket.AF_UNIX) as hangs, ThreadPoolExecutor() as threads:
        hangs.bind(str(folder / "a"))
        hangs.listen()
        outcome = threads.submit(ask, folder / "a", b"x" * size, 0.5)
        ended = wait([outcome], 20).done
        hangs.close()  # else the thread would wait on in a failed test
        assert ended
        assert outcome.result() is None


def test_an_asker_that_hangs_is_left(resident, monkeypatch, caplog):
    monkeypatch.setattr(resident_module, "SILENCE", 0.2)
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(resident()))
        asker.sendall(b"\0\0")  # the start of a frame
        asker.settimeout(20)
        assert asker.recv(10) == b""
    assert "closed its connection before" in caplog.text


def test_a_stranger_without_frames_does_no_harm(resident):
    path = resident()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    assert ask(path, b"x", 20) == b"x"


def test_sigterm_ends_the_process_cleanly(folder, echo):
    program, asked = echo
    with subprocess.Popen(program.command) as process:
        waited(lambda: state_of(folder / "a"))
        outcome = asked(b"sleep 60")
        waited(lambda: state_of(folder / "a") == "busy")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not (folder / "a").exists()
    log = program.log.with_name("resident.log").read_text()
    assert " | INFO | stopped by SIGTERM" in log
    assert outcome.result(60) is None


@pytest.mark.parametrize("order", [b"sleep 60", b"die"])
def test_a_process_that_is_killed_is_started_again(order, folder, echo):
    program, asked = echo
    with Supervisor([program]) as supervisor:
        waited(lambda: state_of(folder / "a"))
        first, outcome = supervisor.process("a"), asked(order)
        if order != b"die":
            waited(lambda: state_of(folder / "a") == "busy")
            os.kill(first, signal.SIGKILL)
        assert outcome.result(60) is None
        waited(lambda: state_of(folder / "a"))
        second = supervisor.process("a")
        assert second != first
        assert asked(b"x").result(60) == b"x"
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_an_error_or_a_slow_answer_about_one_program_stops_no_other(folder):
    def fail(ended):
        raise TypeError("a bug")

    is_asked, asked = threading.Event(), []

    def slow(ended):
        is_asked.set()
        time.sleep(100)

    def at_once(ended):
        asked.append(ended.times)
        return 0.0

    programs = [
        Program(name, ["true"], folder / name, again=again)
        for name, again in (("fail", fail), ("slow", slow), ("good", at_once))
    ]
    with Supervisor(programs) as supervisor:
        with pytest.raises(TypeError, match="a bug"):
            supervisor.wait()
        assert is_asked.wait(20)
        before = len(asked)
        waited(lambda: len(asked) > before + 2)
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_a_program_that_does_not_end_is_killed(folder, monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE", 0.1)
    command = ["sh", "-c", "trap '' TERM; echo ready; sleep 100; sleep 100"]
    program = Program("p", command, folder / "log")
    with Supervisor([program]):
        waited(lambda: program.process and "ready" in (folder / "log").read_text())
    assert program.process is None
    assert "p does not end: killed" in (folder / "log").read_text()


def test_a_program_ends_with_its_supervisor_even_if_that_is_killed(folder):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fl_lightning.flower.network.supervision import Program, Supervisor\n"
        "with Supervisor([Program('p', ['sleep', '100'], Path(sys.argv[1]))]) as s:\n"
        "    while not (process := s.process('p')):\n"
        "        time.sleep(0.01)\n"
        "    print(process, flush=True)\n"
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


def test_a_loopback_has_one_outcome_for_each_order(resident, folder):
    sites = {name: resident(name=name) for name in "ab"}
    sites["slow"] = resident(lambda order: time.sleep(0.7) or order, name="slow")
    channel = LoopbackChannel({**sites, "gone": folder / "gone"})
    assert channel.sites() == ["a", "b", "slow"]
    for number in range(2):
        for name in "ab":
            channel.send(name, f"{name}{number}".encode(), 20)
        came = channel.receive(20) + channel.receive(20)
        assert sorted(came) == [(name, f"{name}{number}".encode()) for name in "ab"]
    assert channel.receive(0.05) == []
    channel.send("slow", b"x", 20)
    assert channel.sites() == ["a", "b"]
    assert channel.receive(20) == [("slow", b"x")]
    channel.send("gone", b"x", 20)
    assert channel.receive(20) == [("gone", None)]
