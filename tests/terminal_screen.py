"""A terminal of so many columns, and what a person sees on it."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import typed

_PIECES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def seen(text, columns):
    """Return the lines that a terminal shows, those that have scrolled away included."""
    lines, row, column = [""], 0, 0
    for piece in _PIECES.findall(text):
        if piece == "\r":
            column = 0
        elif piece == "\n" or (column == columns and len(piece) == 1):
            row, column = row + 1, 0 if piece != "\n" else column
            lines += [""] * (row == len(lines))
        if piece[0] == "\x1b":
            row = _moved(piece, lines, row, column)
        elif piece not in "\r\n":
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def _moved(piece, lines, row, column):
    """Do what a control sequence says; return the row of the cursor."""
    if piece[-1] == "A":
        return max(0, row - int(piece[2:-1] or 1))
    if piece[-1] in "JK":
        lines[row] = lines[row][:column]
    if piece[-1] == "J":
        del lines[row + 1 :]
    return row


def typed_at_a_terminal(words, folder, columns, limit=300):
    """Run a command in a folder at a terminal; return its exit code and what it wrote."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    programs = str(Path(sys.executable).parent)
    variables = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    variables.pop("COLUMNS", None)
    process = typed.start(words, folder, variables, [os.ttyname(slave)] * 2)
    while process.exitcode is None and not _is_there(process):
        process.join(0.05)
    os.close(slave)
    written = bytearray()
    with contextlib.suppress(OSError):  # the last one at the terminal has left
        while piece := os.read(master, 65536):
            written += piece
    process.join(limit)
    os.close(master)
    return process.exitcode, written.decode().replace("\r\n", "\n\r")


def _is_there(process):
    """Return whether a process has the terminal by now, so that it stays when we leave it."""
    try:
        return "/dev/pts/" in os.readlink(f"/proc/{process.pid}/fd/2")
    except OSError:
        return False
