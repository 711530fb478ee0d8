"""What aggregators have in common that keep a round's updates until all are there.

Rows do not add up over processes as sums do: they are exchanged, so that each process has all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import Aggregator, AllReduce, Gather
from fl_lightning.server.robust.matrix import UpdateRows


class KeptUpdates(Aggregator):
    """An aggregator but for `open` and `close`; the former makes its rows."""

    exchanges = True

    _rows: UpdateRows

    @property
    @abstractmethod
    def reader(self) -> str:
        """Who looks at the updates, by name."""

    def add(self, update: ClientUpdate) -> None:
        """Keep one update.

        Raises:
            ConfigurationError: if it is under a mask of the client's own.
        """
        check_whole(update, self.reader)
        self._rows.append(update)

    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        """Take the updates of all processes for one's own; to be called by all of them."""
        self._rows = self._rows.exchange(gather, all_reduce)

    def sums(self) -> list[Tensor]:
        """Return nothing: rows do not add up, see `exchange`."""
        return []

    def load_sums(self, sums: list[Tensor]) -> None:
        """Take nothing, see `sums`."""
        assert not sums

    def state_dict(self) -> dict[str, Any]:
        """Return the updates so far."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._rows.load_state_dict(state)


def check_whole(update: ClientUpdate, name: str) -> None:
    """Refuse an update under a mask of the client's own.

    Raises:
        ConfigurationError: naming who needs whole updates.
    """
    if update.active is not None:
        raise ConfigurationError(
            f"{name} compares whole updates, and these clients have masks of their own: share one "
            "mask, or use OverlapMean"
        )
