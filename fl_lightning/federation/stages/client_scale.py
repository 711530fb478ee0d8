"""The fp16 gradient scale, which must carry nothing from one client to the next.

Every client starts from the scale that the round began with; the next round begins with the
lowest scale at which a client of this round ended. So a client's result does not depend on who
trained before it, and the scale still falls where gradients overflow and grows where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import GradientScale
from fl_lightning.federation.stage import LocalTraining, Stage


class ClientScale(Stage):
    """Resets the gradient scale before each client."""

    def __init__(self, scale: GradientScale, ranks: Ranks) -> None:
        self._scale, self._ranks = scale, ranks
        self._lowest: dict[str, Any] | None = None

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Remember the current scale as that of the round's start."""
        self._scale.start_round()

    @contextmanager
    def around(self, training: LocalTraining) -> Iterator[None]:
        """Note the scale at which a client ended, then reset it."""
        if not training.counts:
            yield
            return
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            self._scale.reset()
            raise
        end = self._scale.state()
        if self._lowest is None or _rank(end) < _rank(self._lowest):
            self._lowest = end
        self._scale.reset()

    def before_step(self, record: RoundRecord) -> None:
        """Find the lowest scale over all processes."""
        ends = [end for end in self._ranks.gather(self._lowest) if end is not None]
        self._lowest = min(ends, key=_rank, default=None)

    def close(self, record: RoundRecord) -> None:
        """Set the scale to the lowest one of the round."""
        if self._lowest is not None:
            self._scale.restore(self._lowest)
            self._lowest = None


def _rank(state: dict[str, Any]) -> tuple[float, int]:
    return state["scale"], state["_growth_tracker"]
