"""The fp16 gradient scale over rounds: a client's result must not depend on clients that trained before it.

Every client starts from the scale with which the round began (`RoundStart`). The next round begins with the
lowest scale at which a client of this round ended, so that the scale falls if gradients overflow and grows if
they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.client.state.round_start import RoundStart
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import LocalTraining, Stage


class ClientScale(Stage):
    """Sets a round's fp16 loss scale to the lowest scale at which a client ended the round before."""

    def __init__(self, start: RoundStart, ranks: Ranks) -> None:
        self._start, self._ranks = start, ranks
        self._lowest: dict[str, Any] | None = None

    @contextmanager
    def around(self, training: LocalTraining) -> Iterator[None]:
        """Record the fp16 loss scale at which a client ended, unless the client failed."""
        yield
        end = self._start.scale()
        if training.counts and end is not None:
            self._lowest = min(end, self._lowest or end, key=_rank)

    def before_step(self, record: RoundRecord) -> None:
        """Find the lowest fp16 loss scale at which a client of the round ended, over all processes."""
        ends = [end for end in self._ranks.gather(self._lowest) if end is not None]
        self._lowest = min(ends, key=_rank, default=None)

    def close(self, record: RoundRecord) -> None:
        """Set the next round's fp16 loss scale to the lowest scale at which a client of this round ended."""
        if self._lowest is not None:
            self._start.set_scale(self._lowest)
            self._lowest = None


def _rank(state: dict[str, Any]) -> tuple[float, int]:
    return state["scale"], state["_growth_tracker"]
