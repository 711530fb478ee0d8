"""Whatever stops a run: nobody is left, the exit code is right, and it ends in the same bits."""

import os
import random
import signal
import time

import pytest
from stopping import SECONDS, Run, assert_same_bits, final_state, members, saved_step

LAST = ("--ckpt_path", "last")
KILLED, TERMINATED, INTERRUPTED = -signal.SIGKILL, 128 + signal.SIGTERM, 130


FEW, MANY = 12, 80  # rounds


def whole(folder, rounds):
    """Return the weights at the end of a fit that nobody stops."""
    run = Run(folder, 1, rounds)
    assert run.end()[0] == 0, run.said()
    return final_state(folder, rounds)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("whole"), FEW)


def parent(run):
    os.kill(run.pid, run.signum)


def group(run):
    os.killpg(run.pid, run.signum)


def child(run):
    os.kill(members(run.pid)[-1], run.signum)


def send(run, signum, whom):
    run.signum = signum
    whom(run)


# the signal, to whom, in how many processes, and the exit code of the command
SIGNALS = [
    (signal.SIGINT, parent, 1, INTERRUPTED),
    (signal.SIGINT, group, 2, INTERRUPTED),
    (signal.SIGKILL, child, 2, 1),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            (signal.SIGINT, group, 1, INTERRUPTED),
            (signal.SIGINT, parent, 2, INTERRUPTED),
            (signal.SIGINT, child, 2, INTERRUPTED),
            (signal.SIGTERM, parent, 1, TERMINATED),
            (signal.SIGTERM, parent, 2, TERMINATED),
            (signal.SIGTERM, group, 2, TERMINATED),
            (signal.SIGTERM, child, 2, TERMINATED),
            (signal.SIGKILL, parent, 2, KILLED),
        )
    ),
]


@pytest.mark.parametrize(("signum", "whom", "devices", "code"), SIGNALS)
def test_signals(tmp_path, signum, whom, devices, code, expected):
    run = Run(tmp_path, devices, FEW)
    run.wait_for_step(1)
    send(run, signum, whom)
    ended, seconds = run.end(60)
    said = run.said()
    assert ended == code, said
    assert seconds < SECONDS, said
    assert "Traceback" not in said
    done = saved_step(tmp_path)
    assert 1 <= done < FEW, said
    if signum == signal.SIGINT:
        assert f"stopped by Ctrl-C after round {done}, which is saved: resume with" in said
    run = Run(tmp_path, devices, FEW, *LAST)
    assert run.end()[0] == 0, run.said()
    assert_same_bits(final_state(tmp_path, FEW), expected)


def kill_again_and_again(folder, devices, times, rounds, expected):
    """Kill a run at random moments, take it up each time, and see it to its end."""
    draws = random.Random(times)
    killed = 0
    while killed < times and saved_step(folder) < rounds - 2:
        begun = saved_step(folder)
        run = Run(folder, devices, rounds, *(LAST if begun else ()))
        # mostly while it trains, sometimes while it starts, if there is something to start from
        if not begun or draws.random() < 0.8:
            run.wait_for_step(begun + 1)
            time.sleep(draws.uniform(0, 0.2))
        else:
            time.sleep(draws.uniform(0, 1.5))
        whom = child if devices > 1 and len(members(run.pid)) > 1 and killed % 3 == 2 else parent
        send(run, signal.SIGKILL, whom)
        code, seconds = run.end(60)
        assert code in (KILLED, 1) if whom is child else code == KILLED, run.said()
        assert seconds < SECONDS, run.said()
        killed += 1
    assert killed == times
    run = Run(folder, devices, rounds, *LAST)
    assert run.end()[0] == 0, run.said()
    assert_same_bits(final_state(folder, rounds), expected)


def test_kills(tmp_path, expected):
    kill_again_and_again(tmp_path, 1, 2, FEW, expected)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_fifteen_kills(tmp_path, devices):
    expected = whole(tmp_path / "whole", MANY)
    kill_again_and_again(tmp_path / "killed", devices, 15, MANY, expected)


def run_slowly(folder, devices):
    """Start a run with rounds of half a minute and return when it trains."""
    model = ("--model", "stopping.SlowClassifier", "--federation.engine", "sequential")
    run = Run(folder, devices, FEW, *model, "--federation.local_steps", "60")
    deadline = time.monotonic() + 60
    while not (folder / "trains").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return run


@pytest.mark.parametrize("devices", [1, 2])
def test_a_long_round_is_given_up(tmp_path, devices):
    run = run_slowly(tmp_path, devices)
    send(run, signal.SIGINT, group)
    code, seconds = run.end(60)
    assert (code, seconds < SECONDS) == (INTERRUPTED, True), run.said()
    assert (
        "stopped by Ctrl-C before the first checkpoint: start again with the same command"
        in run.said()
    )
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_ctrl_c_stops_at_once(tmp_path, devices):
    run = run_slowly(tmp_path, devices)
    send(run, signal.SIGINT, group)
    time.sleep(0.5)
    assert members(run.pid)
    send(run, signal.SIGINT, group)
    code, seconds = run.end(60)
    assert (code, seconds < 1.5) == (INTERRUPTED, True), run.said()
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("file", ["said.txt", "config.yaml"])  # while it builds, and sets up
def test_ctrl_c_before_the_first_round_stops_at_once(tmp_path, file):
    run = Run(tmp_path, 2, FEW)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob(file)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    send(run, signal.SIGINT, group)
    code, seconds = run.end(60)
    assert (code, seconds < SECONDS) == (INTERRUPTED, True), run.said()
    assert "Traceback" not in run.said()


def test_ctrl_c_as_processes_begin(tmp_path):
    run = Run(tmp_path, 2, FEW, "--model", "stopping.StoppedAtBirth")
    code, _ = run.end(60)
    assert code == INTERRUPTED, run.said()
    assert "stopped by Ctrl-C" in run.said()
    assert "Traceback" not in run.said()
