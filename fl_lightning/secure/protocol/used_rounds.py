"""Which rounds a client has taken part in: it gives its pads to no round a second time."""

from __future__ import annotations

from typing import Any

from fl_lightning.secure.protocol.session import RefusedError


class UsedRounds:
    """The latest round of each run; rounds only go up. It outlives sessions and restarts.

    Example:
        >>> used = UsedRounds()
        >>> used.use("run", 3)
        >>> used.use("run", 3)
        Traceback (most recent call last):
        ...
        fl_lightning.secure.protocol.session.RefusedError: round 3 of run 'run' is not new: this \
client has taken part in round 3
    """

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}

    def use(self, run: str, round_index: int) -> None:
        """Note that a round is used now.

        Raises:
            RefusedError: if it, or a later one, has been used.
        """
        latest = self._latest.get(run, -1)
        if round_index <= latest:
            raise RefusedError(
                f"round {round_index} of run {run!r} is not new: this client has taken part in "
                f"round {latest}"
            )
        self._latest[run] = round_index

    def state_dict(self) -> dict[str, Any]:
        """Return what must be kept."""
        return {"kind": "used rounds", "latest": dict(self._latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was kept; of rounds used meanwhile none is forgotten.

        Raises:
            ValueError: if it is another kind of state.
        """
        if state.get("kind") != "used rounds":
            raise ValueError(f"this is no state of used rounds but of {state.get('kind')!r}")
        for run, latest in state["latest"].items():
            self._latest[run] = max(latest, self._latest.get(run, -1))
