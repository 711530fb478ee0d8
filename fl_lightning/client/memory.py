"""What clients remember from one round to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Key = tuple[str, int]


class ClientMemory:
    """Vectors by name and client; what is put counts from `commit` on.

    Example:
        >>> memory = ClientMemory()
        >>> memory.put("control variate", 3, torch.ones(2))
        >>> memory.get("control variate", 3) is None
        True
        >>> memory.commit()
        >>> memory.get("control variate", 3)
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._vectors: dict[Key, Tensor] = {}
        self._new: dict[Key, Tensor] = {}

    def get(self, name: str, client: int) -> Tensor | None:
        """Return what a client remembers, not to be changed; None if nothing."""
        return self._vectors.get((name, client))

    def put(self, name: str, client: int, vector: Tensor) -> None:
        """Have a client remember a vector from the end of the round on."""
        self._new[name, client] = vector

    @property
    def waiting(self) -> frozenset[Key]:
        """What was put since the last `commit`."""
        return frozenset(self._new)

    def discard(self, keep: frozenset[Key] = frozenset()) -> None:
        """Forget what was put since the last `commit`, but for some."""
        self._new = {key: vector for key, vector in self._new.items() if key in keep}

    def commit(self) -> None:
        """Let what was put count."""
        self._vectors.update(self._new)
        self._new = {}

    def relocate(self, name: str, positions: Tensor) -> None:
        """Have vectors of a name follow their coordinates."""
        for key, vector in self._vectors.items():
            if key[0] == name:
                known = vector[positions.clamp(min=0)]
                self._vectors[key] = torch.where(positions >= 0, known, 0)

    def state_dict(self, *, with_round: bool = True) -> dict[str, Any]:
        """Return all."""
        return {"vectors": self._vectors, "new": self._new if with_round else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._vectors, self._new = dict(state["vectors"]), dict(state["new"])
