"""What one client has to do in a round."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fl_lightning.core.seeds import derive_seed


class ClientWork(NamedTuple):
    """What one client has to do in a round.

    Attributes:
        client_id: whose it is.
        num_examples: its aggregation weight.
        order: indices of its examples in the order in which local steps see them, shape (n,).
        sizes: how many of them each local step takes, Σ sizes = n.
        round_index: which round.
        root_seed: of the run.
    """

    client_id: int
    num_examples: int
    order: Tensor
    sizes: list[int]
    round_index: int = 0
    root_seed: int = 0

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The indices of every local step."""
        return tuple(self.order.split(self.sizes))

    @property
    def seed(self) -> int:
        """Where its dropout, its augmentation and the like draw from."""
        return derive_seed(self.root_seed, "local training", self.round_index, self.client_id)

    def head(self, num_steps: int) -> ClientWork:
        """Return its first local steps."""
        sizes = self.sizes[:num_steps]
        return self._replace(order=self.order[: sum(sizes)], sizes=sizes)
