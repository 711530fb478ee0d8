"""Start of a run over a network, its log until the end, and the status of a network's sites and runs.

The server's app writes the log of a run into a file, which it locks as long as it lives. Flower takes a minute to
notice that a program was killed, so this module asks Flower for the status of a run only if the file is not locked.
"""

from __future__ import annotations

import fcntl
import getpass
import itertools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from fl_lightning.core.errors import Interrupted, RoundFailure
from fl_lightning.flower.network.control import Control
from fl_lightning.flower.network.folder import NetworkFolder
from fl_lightning.flower.network.serving import SERVER_RUN
from fl_lightning.flower.transport.apps import write_app
from fl_lightning.flower.transport.grid import SEEN

_EXPLAINED = "fl-lightning: "  # start of the line that explains why a run has ended
_PAUSE, _STATUS_PAUSE = 0.5, 3.0
_END_SECONDS = 15.0  # from the end of a program to Flower's own account of it
_RUNS = "run-*.log"  # logs of runs, beside those of the server's programs
_WRONG = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|\w+Error\b")
_MOST_LINES, _MOST_TIMES = 2, 3
_UNKNOWN = "-"


class RunLost(RoundFailure):
    """Raised if the program of a run was killed: the run can be resumed from its last checkpoint."""


def carry_out(
    control: Control,
    say: Callable[[str], None],
    *,
    options: Mapping[str, str | int | float],
    configuration: str = "",
    run: str = SERVER_RUN,
) -> None:
    """Start a run at a server and show its log; if its program is killed, resume it from its last checkpoint.

    Args:
        control: control interface of the server.
        say: shows a line to people.
        options: options of the run.
        configuration: configuration of the run, as YAML.
        run: function that the server runs, ``module:function``.

    Raises:
        RoundFailure: if the run has failed, or was lost three times without a new checkpoint.
    """
    logs = Logs(control.network.server / "log")
    saved, times = 0, 0
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        note = Path(name, "checkpoint")  # in which the run writes the path of its checkpoint
        given = {**options, "note": str(note), "user": getpass.getuser()}
        for number in itertools.count():
            app, log = Path(name, f"app_{number}"), logs.new()
            write_app(app, run, {**given, "log": str(log)}, configuration)
            try:
                follow(control, control.run(app), log, say)
                return
            except RunLost as lost:
                last = Path(note.read_text()) if note.exists() else None
                newest = last.stat().st_mtime_ns if last is not None and last.exists() else 0
                times = 1 if newest > saved else times + 1
                told = f"{lost}{''.join(f'{chr(10)}  {line}' for line in logs.last_lines())}"
                if times >= _MOST_TIMES:
                    raise RunLost(told) from None
                saved = newest
                if newest:
                    given["resume"] = str(last)
                again = f"the run starts again from {'its last completed round' if newest else 'its beginning'}"
                say(f"{told}\n{again}")


def follow(control: Control, run: str, log: Path, say: Callable[[str], None]) -> None:
    """Show the log of a run until its end; Ctrl-C ends the run.

    Raises:
        RoundFailure: if the run has failed.
    """
    rest = ""
    try:
        with log.open() as file:
            for state in _states(control, run, file):
                *lines, rest = f"{rest}{file.read()}".split("\n")
                for line in filter(str.strip, lines):
                    say(_plain(line).rstrip())
                if state[0].startswith("finished"):
                    break
    except Interrupted:
        control.stop(run)
        raise
    if rest.strip():  # a last line that no newline ends
        say(_plain(rest).rstrip())
    status, details = state
    if status != "finished:completed":
        raise _failure(log, status, details)


def _plain(text: str) -> str:
    """Return text without the colours that Flower's programs print."""
    return Text.from_ansi(text).plain


def _failure(log: Path, status: str, details: str) -> RoundFailure:
    if any(line.startswith(_EXPLAINED) for line in log.read_text().splitlines()):
        return RoundFailure(
            "the run has failed for the reason above; --resume last resumes from its last completed round"
        )
    if status == "finished:failed":
        return RunLost(f"the run was lost: {details}")
    return RoundFailure(f"the run has ended as {status.partition(':')[2]}: {details}")


def _states(control: Control, run: str, log: TextIO) -> Iterator[tuple[str, str]]:
    """Poll a run again and again, and yield its status and details each time."""
    last_alive = math.inf
    while True:
        if is_alive := _is_locked(log):
            last_alive = time.monotonic()
        status, details = ("running", "") if is_alive else control.status_of(run)
        if status == "running" and time.monotonic() > last_alive + _END_SECONDS:
            status, details = "finished:failed", "its program was killed"
        yield status, details
        time.sleep(_PAUSE if is_alive else _STATUS_PAUSE)


def _is_locked(file: TextIO) -> bool:
    """True if another process holds the lock of an open file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


class Logs:
    """Log files of a server's programs, read from where they ended when this object was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes = {path: path.stat().st_size for path in folder.glob("*.log")}

    def new(self) -> Path:
        """Make a new file for a run's log, and return its path."""
        begin, end = _RUNS.split("*")
        begin += time.strftime("%Y%m%d-%H%M%S-")
        descriptor, path = tempfile.mkstemp(prefix=begin, suffix=end, dir=self._folder)
        os.close(descriptor)
        return Path(path)

    def last_lines(self) -> list[str]:
        """Return the last warnings and errors of each program, with the name of its file."""
        found = []
        for path in sorted(set(self._folder.glob("*.log")) - set(self._folder.glob(_RUNS))):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                lines = _plain(file.read().decode(errors="replace")).splitlines()
            wrong = [line.strip() for line in lines if _WRONG.search(line)]
            found += [f"{path.name}: {line}" for line in wrong[-_MOST_LINES:]]
        return found


def sites(network: NetworkFolder, control: Control) -> Sequence[Sequence[str]]:
    """Return one row of status for each site: name, state, when it was last seen, its versions."""
    nodes = {int(node["node-id"]): node for node in control.nodes()}
    registered = network.registered()
    seen_file = network.nodes_file.with_name(SEEN)
    seen: dict[str, Mapping[str, str]] = (
        json.loads(seen_file.read_text()) if seen_file.exists() else {}
    )
    rows = []
    for name in network.sites:
        node: Mapping[str, Any] = nodes.get(registered.get(name, {}).get("node", 0), {})
        is_here = node.get("status") == "online"
        last = "now" if is_here else str(node.get("offline-at") or "never")
        versions = [seen.get(name, {}).get(part, _UNKNOWN) for part in ("fl-lightning", "flwr")]
        rows.append([name, str(node.get("status", "not registered")), last, *versions])
    return rows


def runs(control: Control) -> Sequence[Sequence[str]]:
    """Return one row of status for each run, the newest first: number, state, when it was started."""
    return [
        [str(one.get("run-id")), str(one.get("status")), str(one.get("running-at") or _UNKNOWN)]
        for one in control.runs()
    ]


def last_log_line(network: NetworkFolder) -> str:
    """Return the last line of the newest run's log, which may tell its round."""
    files = sorted((network.server / "log").glob(_RUNS))
    lines = files[-1].read_text().splitlines() if files else []
    return lines[-1] if lines else _UNKNOWN
