"""Supervision of programs: they are restarted when they end, and all are ended together."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fl_lightning.core.processes import tied

_GRACE = 10.0
_POLL_SECONDS = 0.1
_LONGEST_PAUSE, _LONG_LIFE = 30.0, 60.0
_MOST_WORDS = 20_000


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    Attributes:
        code: exit code; a negative number is the signal that ended the program.
        words: output since the start, at most the last 20 kB.
        times: number of ends in a row, each within a minute after the start.
    """

    code: int
    words: str
    times: int


def backoff(ended: Ended) -> float:
    """Return the seconds until a program is started again: 1, 2, 4, up to 30.

    Args:
        ended: end of the program.

    Example:
        >>> [backoff(Ended(1, "", times)) for times in (1, 2, 3, 9)]
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
        again: returns the seconds between an end and the next start; it may raise, to give up.
        layer: programs of higher layers are ended first.
        process: current process; None between an end and the next start.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    again: Callable[[Ended], float] = backoff
    layer: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)  # time of the next start
    _times: int = field(default=0, init=False)  # number of ends in a row

    def look(self) -> None:
        """Start the program if it is due, or note that it has ended."""
        if self.process is None:
            if time.monotonic() >= self._next:
                self._start()
        elif (code := self.process.poll()) is not None:
            self._end_group()
            lived = time.monotonic() - self._started
            self._times = 1 if lived > _LONG_LIFE else self._times + 1
            pause = self.again(Ended(code, self._words(), self._times))
            self._note(f"ended with code {code} after {lived:.0f} s; again in {pause:g} s")
            self._next = time.monotonic() + pause

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def end(self, until: float) -> None:
        """Wait for the end until a time, then kill the program and its children."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._note("does not end: killed")
        self._end_group()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            self.process = subprocess.Popen(
                tied(self.command),
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def _end_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

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


class Supervisor:
    """Keeps programs running inside a ``with`` block, and ends them with the block, layer by layer.

    Args:
        programs: programs in the order of their start.
    """

    def __init__(self, programs: Sequence[Program] = ()) -> None:
        self._programs, self._first = list[Program](), programs

    def __enter__(self) -> Self:
        for program in self._first:
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
        """Start a program, and keep it running.

        Args:
            program: one more program.
        """
        self._programs.append(program)
        program.look()

    def watch(self, is_over: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Keep all programs running until ``is_over`` returns True, which is returned, or for some seconds.

        Args:
            is_over: called ten times a second.
            seconds: longest time to watch.
        """
        until = time.monotonic() + seconds
        while not (over := is_over()) and time.monotonic() < until:
            self.look()
            time.sleep(_POLL_SECONDS)
        return over

    def look(self) -> None:
        """Restart programs that have ended and are due."""
        for program in list(self._programs):
            program.look()

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Keep all programs running by another thread inside a ``with`` block."""
        is_over = threading.Event()
        thread = threading.Thread(target=self.watch, args=[is_over.is_set], daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def process(self, name: str) -> int | None:
        """Return the process id of a program; None between an end and the next start."""
        [process] = [each.process for each in self._programs if each.name == name]
        return None if process is None else process.pid
