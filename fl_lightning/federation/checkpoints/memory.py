"""What clients remember, in a run: where its files are, what a checkpoint holds, who knows of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer

from fl_lightning.client.memory import ClientMemory, VectorFile
from fl_lightning.federation.checkpoints.files import (
    AtomicCheckpointIO,
    WorkingFolder,
    memory_folder,
)
from fl_lightning.federation.processes.ranks import Ranks


class Waiting(NamedTuple):
    """A vector that a client remembers from the round's end on."""

    name: str  # what it is
    client: int  # whose
    size: int  # k
    dtype: torch.dtype  # of its numbers


class RunMemory:
    """The clients' memory of one fit.

    Every process has all of it, because a client may train in another one the next time.

    Attributes:
        clients: the memory itself.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, ram_bytes: float) -> None:
        self._trainer, self._ranks = trainer, ranks
        root = str(trainer.default_root_dir)
        parent = Path(tempfile.gettempdir() if "://" in root else root)
        self.clients = ClientMemory(ram_bytes, WorkingFolder(parent))

    def waiting(self) -> list[Waiting]:
        """Owners, sizes and types of this process's memories that wait to be shared."""
        vectors = self.clients.waiting().items()
        return [Waiting(*key, vector.numel(), vector.dtype) for key, vector in vectors]

    def share(self, waiting: Sequence[Sequence[Waiting]], device: torch.device) -> None:
        """Share the clients' memories of this round among all processes.

        To be called by all of them. The vectors travel one after the other, so that no process
        holds them all in RAM.

        Args:
            waiting: of every process, in order of rank.
            device: on which tensors travel.
        """
        own = self.clients.waiting()
        for rank, name, client, size, dtype in (
            (rank, *each) for rank, all_of_it in enumerate(waiting) for each in all_of_it
        ):
            if rank == self._ranks.rank:
                self._ranks.broadcast(own[name, client].to(device), source=rank)
                continue
            vector = torch.empty(size, dtype=dtype, device=device)
            self._ranks.broadcast(vector, source=rank)
            self.clients.put(name, client, vector)

    def files_of_checkpoint(self) -> Sequence[VectorFile]:
        """Return the files to which the last `state_dict` refers."""
        return self.clients.files_of_checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the memories, or where they are; of several processes one writes it."""
        if self._ranks.rank > 0:
            return {}
        beside = isinstance(self._trainer.strategy.checkpoint_io, AtomicCheckpointIO)
        return self.clients.state_dict(inside=not beside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memories of a checkpoint, whose files lie beside it.

        Raises:
            ConfigurationError: if they do not.
        """
        if state:
            self.clients.load_state_dict(state, _folder(self._trainer.ckpt_path))


def saved_memory(state: Mapping[str, Any], path: str | Path | None) -> ClientMemory:
    """Return the memories of a checkpoint, to be read.

    Raises:
        ConfigurationError: if they are not.
    """
    memory = ClientMemory()
    if state:
        memory.load_state_dict(state, _folder(path))
    return memory


def _folder(path: str | Path | None) -> Path | None:
    return None if path is None else memory_folder(Path(path).resolve())  # it may be a link
