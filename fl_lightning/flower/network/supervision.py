"""Supervision of programs: they are restarted when they end, and all are ended together."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
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
_GRACE = 10.0  # seconds from the signal to end until a program is killed
_LONGEST_PAUSE, _LONG_LIFE = 30.0, 60.0
_MOST_WORDS = 20_000


@dataclass(frozen=True)
class ProgramEnd:
    """Exit code and last output of a program that has ended.

    Attributes:
        code: exit code; a negative number is the signal that ended the program.
        words: output since the start, at most the last 20 kB.
        times: number of ends in a row, each within a minute after the start.
    """

    code: int
    words: str
    times: int


def backoff(ended: ProgramEnd) -> float:
    """Return the seconds until a program that has ended is started again: 1, 2, 4, up to 30.

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
        again: returns the seconds between an end and the next start; it may take long.
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
    _is_over: threading.Event = field(default_factory=threading.Event, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def keep_running(self) -> None:
        """Start the program, and start it again each time that it ends, until `ask_to_end`.

        The system ends a program with the thread that has started it: this one runs as long as the program.
        """
        times = 0
        while (process := self._started()) is not None:
            code = process.wait()
            lived = time.monotonic() - self._began
            _kill_group(process)
            self.process = None
            if self._is_over.is_set():
                return
            times = 1 if lived > _LONG_LIFE else times + 1
            pause = self.again(ProgramEnd(code, self._words(), times))
            self._note(f"ended with code {code} after {lived:.0f} s; again in {pause:g} s")
            self._is_over.wait(pause)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the program, and do not start it again."""
        with self._starting:
            self._is_over.set()
        if (process := self.process) is not None:
            process.terminate()

    def end(self, until: float) -> None:
        """Wait for the program's end until a time of `time.monotonic`, then kill it; in any case kill its children."""
        if (process := self.process) is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        is_late = process.poll() is None
        _kill_group(process)
        process.wait()
        self.process = None
        if is_late:
            self._note("does not end: killed")

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Start the program's process, and return it; None if `ask_to_end` was called."""
        with self._starting:
            if self._is_over.is_set():
                return None
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
            return self.process

    def _words(self) -> str:
        """Return the program's output since its last start, at most the last 20 kB."""
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
    """Keeps programs running during a ``with`` block, then ends them, those of the highest layer first.

    Args:
        programs: programs in the order of their start.
    """

    def __init__(self, programs: Sequence[Program] = ()) -> None:
        self._given, self._programs = programs, list[Program]()
        self._errors = queue.SimpleQueue[Exception]()

    def __enter__(self) -> Self:
        for program in self._given:
            self.add(program)
        return self

    def __exit__(self, *error: object) -> None:
        by_layer = sorted(self._programs, key=lambda program: -program.layer)
        for _, layer in itertools.groupby(by_layer, key=lambda program: program.layer):
            programs = list(layer)
            for program in programs:
                program.ask_to_end()
            until = time.monotonic() + _GRACE
            for program in programs:
                program.end(until)

    def add(self, program: Program) -> None:
        """Start a program, and keep it running."""
        self._programs.append(program)
        threading.Thread(target=self._supervise, args=[program], daemon=True).start()

    def _supervise(self, program: Program) -> None:
        try:
            program.keep_running()
        except Exception as error:  # the main thread raises it
            log.exception("%s is no longer supervised", program.name)
            self._errors.put(error)

    def wait(self) -> NoReturn:
        """Wait until the supervision of a program fails, and raise its error."""
        raise self._errors.get()

    def process(self, name: str) -> int | None:
        """Return a program's process id; None while the program waits to be started again."""
        [process] = [each.process for each in self._programs if each.name == name]
        return None if process is None else process.pid
