"""Start of a run over a network, its log until the end, and the status of a network's sites and runs."""

from __future__ import annotations

import getpass
import itertools
import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fl_lightning.core.errors import Interrupted, RoundFailure
from fl_lightning.flower.network.control import Control
from fl_lightning.flower.network.folder import NetworkFolder
from fl_lightning.flower.network.serving import SERVER_RUN
from fl_lightning.flower.transport.apps import write_app
from fl_lightning.flower.transport.grid import SEEN

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_CHATTER = re.compile(
    r"Flower App configuration|^- Recommended property|logstream|^Using SuperLink|^Successfully inst"
)
_EXPLAINED = "fl-lightning: "  # start of the line that explains why a run has ended
_FRAME = " ╭─╮│╰╯"
_PAUSE = 3.0
RUN_LOG = "run.log"  # file with the logs of runs
_WRONG = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|\w+Error\b")
_MOST_LINES, _MOST_TIMES = 2, 3


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
    """Start a run at a server and show its log; a lost run is resumed.

    Args:
        control: control interface of the server.
        say: shows a line to people.
        options: options of the run.
        configuration: configuration of the run, as YAML.
        run: function that the server runs, ``module:function``.

    Raises:
        RoundFailure: if the run has failed, or was lost three times without a new checkpoint.
    """
    saved, times = 0, 0
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        note = Path(name, "checkpoint")  # the run writes there where its checkpoint will be
        given = {**options, "note": str(note), "user": getpass.getuser()}
        for number in itertools.count():
            app = Path(name, f"app_{number}")
            write_app(app, run, given, configuration)
            try:
                follow(control, control.run(app), say)
                return
            except RunLost as lost:
                last = Path(note.read_text()) if note.exists() else None
                newest = last.stat().st_mtime_ns if last is not None and last.exists() else 0
                times = 1 if newest > saved else times + 1
                if times >= _MOST_TIMES:
                    raise
                saved = newest
                if newest:
                    given["resume"] = str(last)
                say(
                    f"{lost}\nthe run starts again from its {'last whole round' if newest else 'start'}"
                )


def follow(control: Control, started: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Show the log of a run until its end; Ctrl-C ends the run.

    Args:
        control: control interface of the server.
        started: command that has started the run and prints its log.
        say: shows a line to people.

    Raises:
        RoundFailure: if the run has failed.
    """
    run, told = "", list[str]()
    logs = Logs(control.network.server / "log")
    try:
        while True:
            for line in _new(lines_of(started), told):
                run = run or next(iter(_STARTED.findall(line)), "")
                say(line)
                with (logs.folder / RUN_LOG).open("a") as file:
                    file.write(f"{line}\n")
            status, details = control.status_of(run) if run else _not_started(told)
            if status.startswith("finished"):
                break
            time.sleep(_PAUSE)  # the server was restarted
            started = control.follow(run)
    except Interrupted:
        started.kill()
        if run:
            control.stop(run)
        raise
    if status != "finished:completed":
        is_explained = _EXPLAINED in details or any(line.startswith(_EXPLAINED) for line in told)
        raise _failure(status, details, logs, is_explained=is_explained)


def _new(lines: Iterator[str], told: list[str]) -> Iterator[str]:
    """Yield lines that were not shown yet, and add them to ``told``: a restarted log begins anew."""
    before = Counter(told)
    for line in lines:
        before[line] -= 1
        if before[line] < 0:
            told.append(line)
            yield line


def _not_started(told: Sequence[str]) -> NoReturn:
    raise RoundFailure(f"Flower has not started the run: {told[-1] if told else 'it says nothing'}")


def _failure(status: str, details: str, logs: Logs, *, is_explained: bool) -> RoundFailure:
    if is_explained:
        return RoundFailure(
            "the run has failed for the reason above; --resume last goes on from its last whole round"
        )
    if status != "finished:failed":
        return RoundFailure(f"the run has ended as {status.partition(':')[2]}: {details}")
    said = "".join(f"\n  {line}" for line in logs.last_lines())
    return RunLost(f"the run was lost: {details}{said}")


class Logs:
    """Log files of a server, read from their current ends.

    Args:
        folder: folder of the files.

    Attributes:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes = {path: path.stat().st_size for path in folder.glob("*.log")}

    def last_lines(self) -> list[str]:
        """Return the last warnings and errors of each file, with the name of the file."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                lines = _COLOURS.sub("", file.read().decode(errors="replace")).splitlines()
            wrong = [line.strip() for line in lines if path.name != RUN_LOG and _WRONG.search(line)]
            found += [f"{path.name}: {line}" for line in wrong[-_MOST_LINES:]]
        return found


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines of a run's log, without Flower's own, up to the reason for the run's end."""
    is_explained = False
    with process:  # closes what is read
        try:
            for line in process.stdout or ():
                plain = _COLOURS.sub("", line).strip().strip(_FRAME)
                if is_explained:  # the rest is Flower's account of it
                    continue
                is_explained = plain.startswith(_EXPLAINED)
                if plain and plain != "INFO :" and not _CHATTER.search(plain):
                    yield plain
        except BaseException:
            process.kill()  # with nothing to say it would never notice, and be waited for
            raise


_UNKNOWN = "-"


def sites(network: NetworkFolder, control: Control) -> Sequence[Sequence[str]]:
    """Return a row for each site: name, state, when it was last seen, its versions.

    Args:
        network: the network.
        control: control interface of its server.
    """
    nodes = {int(node["node-id"]): node for node in control.nodes()}
    of_sites: dict[str, int] = json.loads(network.names_file.read_text())
    seen_file = network.names_file.with_name(SEEN)
    seen: dict[str, Mapping[str, str]] = (
        json.loads(seen_file.read_text()) if seen_file.exists() else {}
    )
    rows = []
    for name in network.sites:
        node = nodes.get(of_sites.get(name, 0), {})
        facts = seen.get(name, {})
        rows.append(
            [
                name,
                str(node.get("status", "not registered")),
                _last_seen(node),
                *(str(facts.get(part, _UNKNOWN)) for part in ("fl-lightning", "flwr")),
            ]
        )
    return rows


def runs(control: Control) -> Sequence[Sequence[str]]:
    """Return a row for each run, the newest first: number, state, when it was started.

    Args:
        control: control interface of the server.
    """
    return [
        [str(one.get("run-id")), str(one.get("status")), str(one.get("running-at") or _UNKNOWN)]
        for one in control.runs()
    ]


def last_words(network: NetworkFolder) -> str:
    """Return the last line of the newest run's log, such as its round.

    Args:
        network: the network.
    """
    file = network.server / "log" / "run.log"
    lines = file.read_text().splitlines() if file.exists() else []
    return lines[-1] if lines else _UNKNOWN


def _last_seen(node: Mapping[str, Any]) -> str:
    if node.get("status") == "online":
        return "now"
    return str(node.get("offline-at") or "never")
