"""What people see of a run over a network, and that nobody waits for a server that says nothing."""

import subprocess
import time

import pytest

from fl_lightning.core.errors import Interrupted
from fl_lightning.flower.network.following import Logs, lines_of

SAID = """
\x1b[92mINFO \x1b[0m:
round 1/3: val/loss 0.146
fl-lightning: round 1, client 3: at site a: training raised an error
Traceback (most recent call last):
ERROR :     Exit Code: 201
"""


def saying(*words):
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_the_sentence_on_why_a_run_has_ended_is_the_last():
    assert list(lines_of(saying("printf", "%s", SAID))) == SAID.splitlines()[2:4]


def test_the_reason_is_found_in_the_log_that_has_it(tmp_path):
    (tmp_path / "superlink.log").write_text("ERROR: of an earlier run\n")
    logs = Logs(tmp_path)
    with (tmp_path / "superlink.log").open("a") as file:
        file.write("INFO: all is well\n")
    ended = "2026-11-27 18:00:00 | WARNING | superexec ended with code -9 after 12 s; again in 1 s"
    (tmp_path / "superexec.log").write_text(f"INFO: started\n{ended}\nINFO: started\n")
    assert logs.last_lines() == [f"superexec.log: {ended}"]


def test_a_run_that_says_nothing_ends_at_once_when_it_is_interrupted():
    process = saying("sh", "-c", "echo waiting; exec sleep 60")
    lines = lines_of(process)
    assert next(lines) == "waiting"
    began = time.monotonic()
    with pytest.raises(Interrupted):
        lines.throw(Interrupted(15))
    assert time.monotonic() - began < 10
    assert process.poll() is not None
