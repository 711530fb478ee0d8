"""What people see of a run over a network, and that nobody waits for a server that says nothing."""

import subprocess
import time

import pytest

from fl_lightning.core.errors import Interrupted
from fl_lightning.flower.network.following import lines_of

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


def test_a_run_that_says_nothing_ends_at_once_when_it_is_interrupted():
    process = saying("sh", "-c", "echo waiting; exec sleep 60")
    lines = lines_of(process)
    assert next(lines) == "waiting"
    began = time.monotonic()
    with pytest.raises(Interrupted):
        lines.throw(Interrupted(15))
    assert time.monotonic() - began < 10
    assert process.poll() is not None
