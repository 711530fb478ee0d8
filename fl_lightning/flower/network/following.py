"""A run over a network, from its start to its end, as its server tells of it."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fl_lightning.core.errors import Interrupted, RoundFailure
from fl_lightning.flower.network.control import Control

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_CHATTER = re.compile(
    r"Flower App configuration|^- Recommended property|logstream|^Using SuperLink|^Successfully inst"
)
_EXPLAINED = "fl-lightning: "  # so begins the sentence on why a run has ended
_FRAME = " ╭─╮│╰╯"
_PAUSE = 3.0


def follow(
    control: Control,
    started: subprocess.Popen[str],
    say: Callable[[str], None],
    log: Path | None = None,
) -> str:
    """Tell of a run until its end, and return its number; Ctrl-C ends the run.

    Args:
        control: of the server.
        started: the command that has started it, whose words are the run's log.
        say: tells people.
        log: a file for all that is said.

    Raises:
        RoundFailure: if the run has failed.
    """
    run, told = "", Counter[str]()
    try:
        while True:
            before = Counter(told)  # a log that is followed again begins anew
            for line in lines_of(started):
                run = run or next(iter(_STARTED.findall(line)), "")
                before[line] -= 1
                if before[line] < 0:
                    told[line] += 1
                    _tell(line, say, log)
            status = control.status_of(run) if run else "finished:failed"
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
        raise RoundFailure(
            f"the run has ended as {status.partition(':')[2]}: its log above says why; --resume last goes on "
            "from its last whole round"
        )
    return run


def _tell(line: str, say: Callable[[str], None], log: Path | None) -> None:
    say(line)
    if log is not None:
        with log.open("a") as file:
            file.write(f"{line}\n")


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what a command says of a run, without Flower's chatter, up to why the run has ended."""
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
