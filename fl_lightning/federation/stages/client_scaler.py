"""The fp16 gradient scaler, which must not carry anything from one client to the next.

Every client starts from the scale that the round began with; the next round begins with the
lowest scale at which a client of this round ended. So a client's result does not depend on who
trained before it, and the scale still falls where gradients overflow and grows where they do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp import GradScaler

from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Processes, Stage, Turn


class ClientScaler(Stage):
    """Winds one scaler back before each client; does nothing where there is none.

    Args:
        scaler: the precision plugin's, or None.
    """

    key = "scaler"

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._start: dict[str, Any] = scaler.state_dict() if scaler is not None else {}
        self._lowest: dict[str, Any] | None = None

    @property
    def is_at_work(self) -> bool:
        """True if there is a scaler."""
        return self._scaler is not None

    def start_round(self) -> None:
        """Note the scale that the last round led to."""
        if self._scaler is not None:
            self._start = self._scaler.state_dict()

    @contextmanager
    def around(self, turn: Turn) -> Iterator[None]:
        """Note where a client ended and wind back for the next."""
        if not turn.counts:
            yield
            return
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            self.wind_back()
            raise
        if self._scaler is None:
            return
        end = self._scaler.state_dict()
        if self._lowest is None or _rank(end) < _rank(self._lowest):
            self._lowest = end
        self.wind_back()

    def wind_back(self) -> None:
        """Return to the round's first scale."""
        self.go_on_from(self._start)

    def present(self) -> dict[str, Any]:
        """Return the present scale, for `go_on_from`."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Return to a scale."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)
            # A step that raised left gradients marked as unscaled; before the first step there
            # is nothing to forget, which `update` takes for misuse
            with contextlib.suppress(AssertionError):
                self._scaler.update(state["scale"])
                self._scaler.load_state_dict(state)

    def settle(self, record: RoundRecord, processes: Processes) -> None:
        """Merge how low the scale fell in every process."""
        ends = [end for end in processes.gather(self._lowest) if end is not None]
        self._lowest = min(ends, key=_rank, default=None)

    def close(self, record: RoundRecord) -> None:
        """Set the scale to the lowest one of the round."""
        if self._scaler is not None and self._lowest is not None:
            self._scaler.load_state_dict(self._lowest)
            self._lowest = None

    def state_dict(self, *, with_round: bool) -> dict[str, Any]:
        """Return the lowest scale so far; the present one is in the precision plugin's state."""
        return {"lowest": self._lowest} if with_round and self._lowest is not None else {}

    def load_state_dict(self, state: dict[str, Any], model: GlobalModel) -> None:
        """Restore the lowest scale."""
        self._lowest = state.get("lowest")


def _rank(state: dict[str, Any]) -> tuple[float, int]:
    return state["scale"], state["_growth_tracker"]
