"""State that a site's clients keep between rounds, on the site's disk.

The new state of a client is valid once the server says that its update counted: orders have the last round in
which each client counted, and state from a round that did not count is discarded. So a server that is killed and
restarted leads to bit-identical client state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import Order
from fl_lightning.flower.packing import RunMask
from fl_lightning.flower.site.ledger import whole_file
from fl_lightning.sparsity.masks.mask import Mask


class SiteMemory:
    """Stores on a site's disk the state that its clients keep between rounds.

    Args:
        folder: folder of the run at this site.

    Attributes:
        mask: mask to whose coordinates stored vectors belong; None in runs without masks.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "memory.pt"
        self._learnt: dict[int, int] = {}  # round of the latest state, by client
        self._counted: dict[int, int] = {}  # round of the valid state, by client
        self._on_disk: dict[str, Any] = {}
        self.mask: RunMask | None = None
        if self._file.exists():
            self._on_disk = torch.load(self._file, weights_only=True)
            self._learnt, self._counted = self._on_disk["learnt"], self._on_disk["counted"]
            if self._on_disk["mask"] is not None:
                mask = Mask.from_state_dict(self._on_disk["mask"])
                self.mask = RunMask(mask, self._on_disk["mask_number"])

    def load_into(self, memory: ClientMemory) -> None:
        """Load the clients' state from disk into the memory of a fit that starts."""
        self._memory = memory
        if self._on_disk:
            self._memory.load_state_dict(self._on_disk.pop("memory"))

    def begin(self, order: Order) -> None:
        """Make the new state of an order's clients valid if the server has used their updates; else discard it.

        Raises:
            ConfigurationError: if the state of a client is of a later round than the server knows.
        """
        waiting = self._memory.waiting_clients
        for client in order.clients:
            counted = order.counted.get(client, -1)
            if self._counted.get(client, -1) > counted:
                raise ConfigurationError(
                    f"client {client} has state of round {self._counted[client]}, and round {counted} is its "
                    "last one for the server, which has resumed an older checkpoint: resume from last.ckpt, or "
                    "start a new run"
                )
            if client in waiting and self._learnt.get(client) == counted:
                self._memory.commit(client)
                self._counted[client] = counted
            if order.kind != "evaluate":  # whose clients may be training meanwhile
                self._memory.discard(client)

    def end(self, order: Order, clients: Sequence[int]) -> None:
        """Store the clients' new state of a round on disk, before the answer leaves."""
        self._learnt |= dict.fromkeys(clients, order.round)
        self._write()

    def check_mask(self, mask: RunMask) -> None:
        """Raise if stored client state cannot be converted to a mask, because the site has missed a mask before it.

        Raises:
            ConfigurationError: with the numbers of both masks.
        """
        if self.mask is None or mask.number == self.mask.number + 1 or self._memory.is_empty:
            return
        raise ConfigurationError(
            f"clients of this site have state for mask {self.mask.number}, and the run is at mask "
            f"{mask.number}: state cannot be converted without the masks in between. Start a new run"
        )

    def follow_mask(self, mask: RunMask) -> None:
        """Write client state to disk under a new mask, after the state was converted to it."""
        self.mask = mask
        self._write()

    def _write(self) -> None:
        state: dict[str, Any] = {
            "memory": self._memory.state_with_waiting(),
            "learnt": self._learnt,
            "counted": self._counted,
            "mask": None if self.mask is None else self.mask.mask.state_dict(),
            "mask_number": 0 if self.mask is None else self.mask.number,
        }
        with whole_file(self._file) as file:
            torch.save(state, file)


# client, number of examples, and sums over the examples
ClientSums = tuple[int, int, Mapping[str, Tensor]]


class Calibrates(Protocol):
    """Interface of a callback that computes sums for masks of trainable entries at a site, and applies the masks."""

    def mask_applier(self, trainer: Trainer) -> Callable[[Mask], None]:
        """Return a function that makes a mask's entries trainable, in a Trainer's module and optimizer."""

    def sums(self, trainer: Trainer, order: Order) -> Iterable[ClientSums]:
        """Return each client's sums for a mask or a head, computed with the order's model."""
