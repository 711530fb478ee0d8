"""The processes of a run, and how they tell each other what they know.

Between two meetings, one per round, every process trains its clients without a word. Whatever goes
wrong with a client is kept until then: a process that ended early would leave the others waiting.
Processes forked on one machine speak as `Neighbours`, others through PyTorch's collectives.
"""

from __future__ import annotations

import io
import pickle
import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, distributed

from fl_lightning.federation.processes.fork import ForkLauncher
from fl_lightning.federation.processes.shared_memory import (
    AWAKE_SECONDS,
    Neighbours,
    let_others_run,
)

# What most processes have to say in a round is shorter, and is said at once.
_SHORT = 2**16


class Ranks:
    """The processes of a Trainer; alone, it is its own whole world.

    Args:
        trainer: with its strategy's environment set up.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size
        self._neighbours = _neighbours(trainer)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank; to be called by all of them."""
        if self.size == 1:
            return [value]
        if self._neighbours is not None:
            return [pickle.loads(told) for told in self._neighbours.gather(_pickled(value))]
        if distributed.get_backend() != "gloo":
            values: list[Any] = [None] * self.size
            distributed.all_gather_object(values, value)
            return values
        own = _pickled(value)
        parts = self._gather_bytes(own, _SHORT)
        longest = max(size for size, _ in parts)
        if longest > _SHORT:
            parts = self._gather_bytes(own, longest)
        return [pickle.loads(content[:size]) for size, content in parts]

    def _gather_bytes(self, content: bytes, room: int) -> list[tuple[int, memoryview]]:
        """Return of every process how many bytes it has, and as many of them as there is room for."""
        message = len(content).to_bytes(8, "little") + content[:room].ljust(room, b"\0")
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        messages = [torch.empty_like(own) for _ in range(self.size)]
        _finish(distributed.all_gather(messages, own, async_op=True))
        found = [memoryview(message.numpy().data) for message in messages]
        return [(int.from_bytes(message[:8], "little"), message[8:]) for message in found]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of one process; to be called by all of them."""
        if self._neighbours is not None:
            self._neighbours.broadcast(tensor, source)
        elif self.size > 1:
            _finish(distributed.broadcast(tensor, src=source, async_op=True))

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes; to be called by all of them."""
        if self._neighbours is not None:
            self._neighbours.all_reduce(tensor)
        elif self.size > 1:
            _finish(distributed.all_reduce(tensor, async_op=True))


def _neighbours(trainer: Trainer) -> Neighbours | None:
    """Return what the processes are to each other if all were forked on this machine."""
    launcher = trainer.strategy.launcher
    found = launcher.neighbours if isinstance(launcher, ForkLauncher) else None
    is_all = found is not None and 1 < found.size == trainer.world_size
    return found if is_all else None


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: PyTorch's own way takes half a millisecond for each."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value again."""
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if not is_plain or value.device.type != "cpu" or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(force=True),)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _finish(work: Any) -> None:
    """Wait for the other processes, at first without going to sleep."""
    if distributed.get_backend() == "gloo":
        until = time.perf_counter() + AWAKE_SECONDS
        while not work.is_completed() and time.perf_counter() < until:
            let_others_run()
    work.wait()
