"""A mask for every client: found on its own examples when it is first needed, then kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.masks.report import MaskCounts


class ClientMasks:
    """Masks by client.

    Args:
        find: returns the mask of a client whose mask is not known yet.

    Attributes:
        counts: over the masks that all processes know.

    Example:
        >>> import torch
        >>> masks = ClientMasks(lambda client: Mask({"weight": torch.arange(3) == client}))
        >>> masks(1)["weight"].tolist(), sorted(masks.state_dict())
        ([False, True, False], [1])
    """

    def __init__(self, find: Callable[[int], Mask]) -> None:
        self._find = find
        self._packed: dict[int, dict[str, Any]] = {}
        self._new: list[int] = []
        self.counts = MaskCounts()

    def __call__(self, client: int) -> Mask:
        """Return a client's mask, on the CPU."""
        if client in self._packed:
            return Mask.from_state_dict(self._packed[client])
        mask = self._find(client)
        self._packed[client] = mask.state_dict()
        self._new.append(client)
        return mask

    def exchange(self, ranks: Ranks) -> int:
        """Let all processes know the masks that one has found; to be called by all of them.

        Returns:
            the bytes of these masks, eight entries to one; 0 if nobody has found any.
        """
        num_bytes = 0
        for found in ranks.gather({client: self._packed[client] for client in self._new}):
            self._packed.update(found)
            for packed in found.values():
                self.counts.add(Mask.from_state_dict(packed))
                num_bytes += sum(bits.numel() for bits in packed["bits"].values())
        self._new = []
        return num_bytes

    def found(self) -> dict[int, Mask]:
        """Return the masks found so far, by client."""
        return {
            client: Mask.from_state_dict(self._packed[client]) for client in sorted(self._packed)
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return all masks found so far, eight entries to a byte."""
        return dict(self._packed)

    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Know these masks."""
        self._packed, self.counts = dict(state), MaskCounts()
        for mask in self.found().values():
            self.counts.add(mask)
