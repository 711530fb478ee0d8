"""What people see of a run over a network: its log up to the end, and the reason for it."""

import fcntl
import subprocess
import sys
import threading

import pytest

from fl_lightning.core.errors import Interrupted, RoundFailure
from fl_lightning.flower.network import following
from fl_lightning.flower.network.following import Logs, RunLost, follow

pytest.importorskip("flwr")


class Control:
    """Of a server whose run has a status."""

    def __init__(self, status):
        self.status, self.stopped = status, []

    def status_of(self, run):
        return self.status, "details"

    def stop(self, run):
        self.stopped.append(run)


def test_a_run_is_followed_while_its_program_lives(tmp_path):
    log, said, control = tmp_path / "log", [], Control("finished:completed")
    log.write_text("fl-lightning: of a library\n\x1b[92mround\x1b[0m 1/3\n\nrou")

    def say(line):
        said.append(line)
        if line == "round 1/3":
            file.write("nd 2/3\nat the end")
            file.flush()
            threading.Timer(0.1, file.close).start()

    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        follow(control, "1", log, say)
    assert said == ["fl-lightning: of a library", "round 1/3", "round 2/3", "at the end"]


@pytest.mark.parametrize(
    ("status", "text", "error", "reason"),
    [
        ("finished:failed", "fl-lightning: client 3\n", RoundFailure, "for the reason above"),
        ("finished:failed", "round 1\n", RunLost, "the run was lost: details"),
        ("finished:stopped", "round 1", RoundFailure, "ended as stopped: details"),
    ],
)
def test_a_run_that_has_failed_says_why(status, text, error, reason, tmp_path):
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(error, match=reason):
        follow(Control(status), "1", log, print)


def test_a_run_whose_program_was_killed_is_lost_before_flower_notices(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "_END_SECONDS", 0.5)
    log, control = tmp_path / "log", Control("running")
    file = log.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    threading.Timer(0.5, file.close).start()
    with pytest.raises(RunLost, match="its program was killed"):
        follow(control, "1", log, print)


def test_ctrl_c_stops_the_run(tmp_path):
    log, control = tmp_path / "log", Control("running")
    log.write_text("waiting\n")

    def interrupt(line):
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        follow(control, "1", log, interrupt)
    assert control.stopped == ["1"]


LOGGED = """
import sys
from fl_lightning.core.errors import RoundFailure
from fl_lightning.flower.transport.apps import _logged
with _logged("log"):
    print("printed")
    raise {error}("a reason")
"""


@pytest.mark.parametrize(("error", "lines"), [("RoundFailure", 1), ("ValueError", 6)])
def test_the_log_has_all_output_and_the_trace_of_an_error_without_a_sentence(
    error, lines, tmp_path
):
    command = [sys.executable, "-c", LOGGED.format(error=error)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr.count("a reason")) == ("", 1)
    log = (tmp_path / "log").read_text().splitlines()
    assert (log.count("printed"), len(log)) == (1, lines)


def test_the_reason_is_found_in_the_log_that_has_it(tmp_path):
    (tmp_path / "superlink.log").write_text("ERROR: of an earlier run\n")
    logs = Logs(tmp_path)
    with (tmp_path / "superlink.log").open("a") as file:
        file.write("INFO: all is well\n")
    ended = "2026-11-27 18:00:00 | WARNING | superexec ended with code -9 after 12 s; again in 1 s"
    (tmp_path / "superexec.log").write_text(f"INFO: started\n{ended}\nINFO: started\n")
    logs.new().write_text("ERROR: shown already\n")
    assert logs.last_lines() == [f"superexec.log: {ended}"]
