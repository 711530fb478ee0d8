"""The fp16 gradient scaler, which must not carry anything from one client to the next.

Every client starts from the scale that the round began with; the next round begins with the
lowest scale at which a client of this round ended. So a client's result does not depend on who
trained before it, and the scale still falls where gradients overflow and grows where they do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch.amp import GradScaler


class ClientScaler:
    """Winds one scaler back before each client; does nothing where there is none.

    Args:
        scaler: the precision plugin's, or None.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._start: dict[str, Any] = scaler.state_dict() if scaler is not None else {}
        self._lowest: dict[str, Any] | None = None

    def start_round(self) -> None:
        """Take up the scale that the last round led to."""
        if self._scaler is not None:
            self._start = self._scaler.state_dict()

    def end_client(self) -> None:
        """Note where a client ended and wind back for the next."""
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

    def merge(self, states: Iterable[dict[str, Any]]) -> None:
        """Take in how low the scale fell in every process, given their `state_dict`."""
        ends = [state["lowest"] for state in states if "lowest" in state]
        self._lowest = min(ends, key=_rank, default=None)

    def end_round(self) -> None:
        """Go on with the lowest scale of the round."""
        if self._scaler is not None and self._lowest is not None:
            self._scaler.load_state_dict(self._lowest)
            self._lowest = None

    def state_dict(self) -> dict[str, Any]:
        """Return the lowest scale so far; the present one is in the precision plugin's state."""
        return {} if self._lowest is None else {"lowest": self._lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._lowest = state.get("lowest")


def _rank(state: dict[str, Any]) -> tuple[float, int]:
    return state["scale"], state["_growth_tracker"]
