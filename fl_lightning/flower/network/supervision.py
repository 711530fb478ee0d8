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
from concurrent.futures import Future
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
        again: returns the seconds between an end and the next start; called in a thread of its own.
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
    _start_at: Future[float] | None = field(default=None, init=False)
    _times: int = field(default=0, init=False)

    def tend(self) -> None:
        """Start the program if it is time to; if it has ended, choose the time of the next start."""
        if self.process is None:
            at = self._start_at
            if at is None or (at.done() and time.monotonic() >= at.result()):
                self._start()
        elif (code := self.process.poll()) is not None:
            _kill_group(self.process)
            self.process = None
            lived = time.monotonic() - self._began
            self._times = 1 if lived > _LONG_LIFE else self._times + 1
            self._start_at = _in_a_thread(lambda: self._next_start(code, lived))

    def _next_start(self, code: int, lived: float) -> float:
        """Return the time of the next start."""
        pause = self.again(ProgramEnd(code, self._words(), self._times))
        self._note(f"ended with code {code} after {lived:.0f} s; again in {pause:g} s")
        return time.monotonic() + pause

    def end(self, until: float) -> None:
        """Wait for the end until a `time.monotonic`; then kill the program, and its children anyway."""
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


def _in_a_thread(function: Callable[[], float]) -> Future[float]:
    """Return the future result of a function, which may take long."""
    result = Future[float]()

    def call() -> None:
        try:
            result.set_result(function())
        except Exception as error:  # noqa: BLE001 - the result raises it
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result


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
        self._errors = queue.SimpleQueue[Exception]()
        # the system ends programs with the thread that has started them
        self._thread = threading.Thread(target=self._supervise, daemon=True, name="supervisor")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _supervise(self) -> None:
        left = set[Program]()  # which cannot be supervised
        while not self._is_over.wait(_POLL_SECONDS):
            for program in [each for each in self._programs if each not in left]:
                try:
                    program.tend()
                except Exception as error:  # the main thread raises it
                    log.exception("%s is no longer supervised", program.name)
                    left.add(program)
                    self._errors.put(error)
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
        """Wait until a program can no longer be supervised, and raise the reason."""
        raise self._errors.get()

    def process(self, name: str) -> int | None:
        """Return the process id of a program; None between an end and the next start."""
        [process] = [each.process for each in self._programs if each.name == name]
        return None if process is None else process.pid
