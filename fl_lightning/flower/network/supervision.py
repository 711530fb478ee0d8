"""Supervision of programs: they are restarted when they end, and all are ended together."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

from fl_lightning.core.processes import tied

log = logging.getLogger(__name__)
_GRACE, _POLL_SECONDS = 10.0, 0.1
_LONGEST_PAUSE, _LONG_LIFE = 30.0, 60.0
_MOST_WORDS = 20_000


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program.

    Attributes:
        code: exit code; a negative number is the signal that ended the program.
        words: output since the start, at most the last 20 kB.
        times: number of ends in a row, each within a minute after the start.
    """

    code: int
    words: str
    times: int


def backoff(ended: ProgramEnd) -> float:
    """Return the seconds until a program is started again: 1, 2, 4, up to 30.

    Args:
        ended: end of the program.

    Example:
        >>> [backoff(ProgramEnd(1, "", times)) for times in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
    """
    return min(_LONGEST_PAUSE, 2.0 ** (ended.times - 1))


@dataclass(eq=False)
class Program:
    """A program to keep running, and its current process.

    Attributes:
        name: name in messages.
        command: program and arguments.
        log: file to which the output is added.
        environment: variables besides those of this process.
        again: returns the seconds between an end and the next start.
        layer: programs of higher layers are ended first.
        process: current process; None between an end and the next start.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    again: Callable[[ProgramEnd], float] = backoff
    layer: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _start_at: float = field(default=0.0, init=False)
    _times: int = field(default=0, init=False)

    def tend(self) -> None:
        """Start the program if it is time to; if it has ended, choose the time of the next start."""
        if self.process is None:
            if time.monotonic() >= self._start_at:
                self._start()
        elif (code := self.process.poll()) is not None:
            _kill_group(self.process)
            self.process = None
            lived = time.monotonic() - self._began
            self._times = 1 if lived > _LONG_LIFE else self._times + 1
            pause = self.again(ProgramEnd(code, self._words(), self._times))
            self._note(f"ended with code {code} after {lived:.0f} s; again in {pause:g} s")
            self._start_at = time.monotonic() + pause

    def end(self, until: float) -> None:
        """Wait for the end until a `time.monotonic`; then kill the program, and its children anyway."""
        if (process := self.process) is None:
            return
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._note("does not end: killed")
        _kill_group(process)
        process.wait()
        self.process = None

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from, self._began = log.tell(), time.monotonic()
            self.process = subprocess.Popen(
                tied(self.command),
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _words(self) -> str:
        """Return the output of the program since its start."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._from, size - _MOST_WORDS))
            return file.read().decode(errors="replace")

    def _note(self, words: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with self.log.open("a") as log:
            log.write(f"{now} | WARNING | {self.name} {words}\n")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Keeps programs running inside a ``with`` block, and ends them with the block, layer by layer.

    Args:
        programs: programs in the order of their start.
    """

    def __init__(self, programs: Sequence[Program] = ()) -> None:
        self._programs, self._is_over = list(programs), threading.Event()
        self._error: Exception | None = None
        # the system ends programs with the thread that has started them
        self._thread = threading.Thread(target=self._supervise, daemon=True, name="supervisor")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _supervise(self) -> None:
        try:
            while not self._is_over.is_set():
                for program in tuple(self._programs):
                    program.tend()
                self._is_over.wait(_POLL_SECONDS)
        except Exception as error:  # the main thread raises it
            log.exception("programs are no longer supervised")
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        by_layer = sorted(self._programs, key=lambda program: -program.layer)
        for _, layer in itertools.groupby(by_layer, key=lambda program: program.layer):
            programs = list(layer)
            for program in programs:
                if program.process is not None:
                    program.process.terminate()
            until = time.monotonic() + _GRACE
            for program in programs:
                program.end(until)

    def add(self, program: Program) -> None:
        """Start a program, and keep it running."""
        self._programs.append(program)

    def wait(self) -> NoReturn:
        """Wait until programs can no longer be supervised, and raise the reason."""
        self._thread.join()
        assert self._error is not None, "nothing else ends the thread inside the block"
        raise self._error

    def process(self, name: str) -> int | None:
        """Return the process id of a program; None between an end and the next start."""
        [process] = [each.process for each in self._programs if each.name == name]
        return None if process is None else process.pid
