"""Base of aggregators that keep all updates until the round ends.

Updates do not add up over processes as sums do: they are exchanged, so that each process has all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import Aggregator, AllReduce, Gather
from fl_lightning.server.robust.matrix import UpdateRows


class KeptUpdates(Aggregator):
    """Base of aggregators that keep all updates; subclasses define `open`, which creates the rows, and `close`."""

    exchanges = True

    _rows: UpdateRows

    @property
    @abstractmethod
    def reader(self) -> str:
        """Name of the class that reads the updates, for error messages."""

    def add(self, update: ClientUpdate) -> None:
        """Keep one update.

        Raises:
            ConfigurationError: if the client has a mask of its own.
        """
        check_whole(update, self.reader)
        self._rows.append(update)

    @override
    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        self._rows = self._rows.exchange(gather, all_reduce)

    def sums(self) -> list[Tensor]:
        """Return an empty list: rows do not add up, see `exchange`."""
        return []

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        assert not sums

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)


def check_whole(update: ClientUpdate, name: str) -> None:
    """Raise ConfigurationError, naming the reader, if the client has a mask of its own."""
    if update.active is not None:
        raise ConfigurationError(
            f"{name} compares whole updates, and these clients have masks of their own: share one "
            "mask, or use OverlapMean"
        )
