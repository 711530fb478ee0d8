"""How processes that were forked from one speak with each other: through memory that they share.

A library of collectives passes messages from thread to thread and from process to process, which
takes milliseconds where all cores are busy. Here each process writes its message where all can read
it and says so to the first one, which answers when all have written: a tenth of a millisecond.

The memory has two places for each process, used in turn. Who writes in one of them has heard that
all have written in the other, and so that nobody reads any more what was in this one before.
"""

from __future__ import annotations

import mmap
import os
import socket
import time

import torch
from torch import Tensor

from fl_lightning.core.errors import ProcessFailure

# Bytes that a process says at once; what is longer goes in pieces that stay in the cores' caches.
ROOM = 2**20
# Before what is said: how long it is, in a line of the cache of its own.
_HEAD = 64
# A core that has gone to sleep takes milliseconds to wake up in virtual machines: longer than others
# that train as much as this process keep it waiting. Others with less to do need not be awake.
AWAKE_SECONDS = 0.01

Bytes = bytes | memoryview


class Neighbours:
    """The processes, as each of them sees the others. All call the same methods in the same order.

    Args:
        size: how many there will be, more than 1. To be made in the process that forks them.

    Attributes:
        size: as given.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._rank = 0
        self._turn = 0
        self._memory = mmap.mmap(-1, 2 * size * (_HEAD + ROOM))
        # the first process's end, and the other's
        self._lines = [socket.socketpair() for _ in range(size - 1)]

    def join(self, rank: int) -> None:
        """Become one of the processes; to be called once in each."""
        self._rank = rank
        for other, (first, own) in enumerate(self._lines, start=1):
            if rank > 0:
                first.close()
            if rank != other:
                own.close()

    def leave(self) -> None:
        """Have others that wait for this process hear that it will not come, or no longer wait."""
        for line in (end for ends in self._lines for end in ends):
            if line.fileno() >= 0:
                line.close()

    def gather(self, content: Bytes) -> list[bytearray]:
        """Return what every process has to say, in order of rank, of any length."""
        parts = self._say(content)
        found = [bytearray(part) for _, part in parts]
        for start in range(ROOM, max(length for length, _ in parts), ROOM):
            for rank, (_, part) in enumerate(self._say(memoryview(content)[start:])):
                found[rank] += part
        return found

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all processes, in order of rank."""
        for piece in _pieces(tensor):
            parts = [_numbers(part, piece) for _, part in self._say(_bytes(piece))]
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece += part

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace a contiguous tensor by that of one process."""
        for piece in _pieces(tensor):
            parts = self._say(_bytes(piece) if self._rank == source else b"")
            if self._rank != source:
                piece.copy_(_numbers(parts[source][1], piece))

    def _say(self, content: Bytes) -> list[tuple[int, memoryview]]:
        """Return how much every process has to say, and as much of it as there is room for."""
        whole = memoryview(self._memory)
        self._turn = 1 - self._turn
        places = [(2 * rank + self._turn) * (_HEAD + ROOM) for rank in range(self.size)]
        own, said = places[self._rank], memoryview(content)[:ROOM]
        whole[own : own + 8] = len(content).to_bytes(8, "little")
        whole[own + _HEAD :][: len(said)] = said
        self._meet()
        lengths = [int.from_bytes(whole[place : place + 8], "little") for place in places]
        return [
            (length, whole[place + _HEAD :][: min(length, ROOM)])
            for place, length in zip(places, lengths, strict=True)
        ]

    def _meet(self) -> None:
        """Return when all have come here. What each has written before, all see afterwards."""
        if self._rank > 0:
            line = self._lines[self._rank - 1][1]
            _call(line)
            _hear(line)
            return
        for line, _ in self._lines:
            _hear(line)
        for line, _ in self._lines:
            _call(line)


def _call(line: socket.socket) -> None:
    try:
        line.send(b".")
    except OSError as error:
        raise _gone() from error


def _hear(line: socket.socket) -> None:
    """Wait for a process, at first without going to sleep."""
    until = time.perf_counter() + AWAKE_SECONDS
    heard = None
    while heard is None:
        is_awake = time.perf_counter() < until
        try:
            heard = line.recv(1, socket.MSG_DONTWAIT if is_awake else 0)
        except BlockingIOError:
            let_others_run()
        except OSError as error:
            raise _gone() from error
    if not heard:
        raise _gone()


def let_others_run() -> None:
    """Give the core away for a moment."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _gone() -> ProcessFailure:
    return ProcessFailure("another process of this run has ended, while this one waited for it")


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.detach().view(-1)
    return flat.split(ROOM // flat.element_size()) if len(flat) else ()


def _bytes(numbers: Tensor) -> memoryview:
    return numbers.view(torch.uint8).numpy().data


def _numbers(content: memoryview, like: Tensor) -> Tensor:
    return torch.frombuffer(content, dtype=like.dtype)
