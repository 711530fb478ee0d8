"""Measurements of processes: time since their start, peak memory; and their result line.

Standard library only: rivals use it in their own environments. Every measurement runs in a process
of its own and ends by printing one line of JSON, which `run` reads.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, TypedDict

ROOT = Path(__file__).parents[1]
_imported = time.monotonic()


class Column(TypedDict):
    """Result of a process that trains rounds.

    Attributes:
        seconds: of each round after the first.
        bare: of the bare loop's round that followed each of them, if one did.
        start_up: seconds of the process until its last round, less as many median rounds: everything
            that is paid once, imports and compilation as well.
        peak_mb: peak resident memory, of several processes the first one's.
    """

    seconds: list[float]
    bare: list[float]
    start_up: float
    peak_mb: float


def seconds_alive() -> float:
    """Return the seconds since this process started; where /proc is missing, since this import."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - _imported
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # proc(5), field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the seconds that this process and its children that have ended have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def peak_mb() -> float:
    """Return this process's peak resident memory in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class Stopwatch:
    """Notes when rounds end, and reports them as a `Column`.

    Args:
        train_bare: trains a round of the bare loop and returns its seconds; it is called after
            every round, so that whatever slows the machine down for a while slows both.
        clock: seconds since the start of the process; those of the clock on the wall by default.
    """

    def __init__(
        self,
        train_bare: Callable[[], float] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        born = time.monotonic() - seconds_alive()  # rounds may be a fork's
        self._clock = clock or (lambda: time.monotonic() - born)
        self._train_bare = train_bare
        self._seconds: list[float] = []
        self._bare: list[float] = []
        self._last = 0.0

    def round_done(self) -> None:
        """Say that a round, with the server's step, is over."""
        now = self._clock()
        self._seconds.append(now - self._last)
        if self._train_bare is not None:
            self._bare.append(self._train_bare())
        self._last = self._clock()

    def report(self, extra_mb: float = 0.0) -> Column:
        """Return the column; ``extra_mb`` is the peak memory of other processes that took part."""
        seconds = self._seconds[1:]
        start_up = sum(self._seconds) - len(self._seconds) * median(seconds)
        return Column(
            seconds=seconds,
            bare=self._bare[1:],
            start_up=max(0.0, start_up),
            peak_mb=peak_mb() + extra_mb,
        )


class MeasurementError(Exception):
    """A measurement that ended without a result; says why."""


def run(
    command: list[str],
    timeout: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Run a command with one thread a process and return what its last line of JSON says.

    Raises:
        MeasurementError: if it ended with an error, took longer than ``timeout`` seconds or printed none.
    """
    output = output_of(command, timeout, environment)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise MeasurementError("the process printed no result")
    return json.loads(lines[-1])


def output_of(
    command: list[str],
    timeout: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run a command with one thread a process and return what it prints.

    Raises:
        MeasurementError: if it ended with an error or took longer than ``timeout`` seconds.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=inherited | dict(environment),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        module = command[2] if command[1:2] == ["-m"] else command[0]
        raise MeasurementError(f"{module} took longer than {timeout:.0f} s") from error
    except OSError as error:
        raise MeasurementError(_one_line(str(error))) from error
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        raise MeasurementError(_one_line(told[-1] if told else f"exit status {done.returncode}"))
    return done.stdout


def _one_line(text: str, most: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
