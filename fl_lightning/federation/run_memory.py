"""What clients remember, in a run: where its files are, what a checkpoint holds, who knows of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.vector_file import VectorFile
from fl_lightning.federation.atomic_checkpoint import AtomicCheckpointIO
from fl_lightning.federation.memory_files import FOLDER, WorkingFolder
from fl_lightning.federation.ranks import Ranks


class RunMemory:
    """The clients' memory of one fit.

    Every process has all of it, because a client may train in another one the next time.

    Args:
        trainer: whose folder is used for files, and whose checkpoints.
        ranks: the processes.
        ram_bytes: of vectors in RAM at most, in each process.

    Attributes:
        clients: the memory itself.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, ram_bytes: float) -> None:
        self._trainer, self._ranks = trainer, ranks
        root = str(trainer.default_root_dir)
        parent = Path(tempfile.gettempdir() if "://" in root else root)
        self.clients = ClientMemory(ram_bytes, WorkingFolder(parent))

    def share(self, device: torch.device) -> None:
        """Have every process know what clients of any of them remember from this round on.

        To be called by all of them. The vectors travel one after the other, so that no process
        holds them all in RAM.

        Args:
            device: on which tensors travel.
        """
        ranks, own = self._ranks, self.clients.waiting()
        known = [(key, vector.shape, vector.dtype) for key, vector in own.items()]
        for rank, entries in enumerate(ranks.gather(known)):
            for (name, client), shape, dtype in entries:
                is_own = rank == ranks.rank
                empty = torch.empty(0 if is_own else shape, dtype=dtype, device=device)
                vector = own[name, client].to(device) if is_own else empty
                ranks.broadcast(vector, source=rank)
                if not is_own:
                    self.clients.put(name, client, vector)

    def files_of_checkpoint(self) -> Sequence[VectorFile]:
        """Return the files to which the last `state_dict` refers."""
        return self.clients.files_of_checkpoint

    def state_dict(self, *, with_round: bool) -> dict[str, Any]:
        """Return the memories, or where they are; of several processes one writes it."""
        if self._ranks.rank > 0:
            return {}
        beside = isinstance(self._trainer.strategy.checkpoint_io, AtomicCheckpointIO)
        return self.clients.state_dict(with_round=with_round, inside=not beside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, whose files lie beside it.

        Raises:
            ConfigurationError: if they do not.
        """
        path = self._trainer.ckpt_path
        self.clients.load_state_dict(state, None if path is None else Path(path).parent / FOLDER)
