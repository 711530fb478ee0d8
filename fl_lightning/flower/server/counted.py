"""In which round each client counted last: every order says it, so that sites know what to remember."""

from __future__ import annotations

from typing import Any

from fl_lightning.client.local_training import GlobalModel
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Stage


class Counted(Stage):
    """Knows in which round each client counted last, which sites have to know.

    Args:
        run: of the run, 32 hexadecimal digits; that of the checkpoint in a resumed one.
    """

    key = "sites"
    reason_against_sites = None
    reason_against_privacy = None

    def __init__(self, run: str) -> None:
        self.run = run
        self.rounds: dict[int, int] = {}

    def close(self, record: RoundRecord) -> None:
        """Note whose update was used."""
        absent = {*record.skipped, *record.lost}
        self.rounds |= {c: self._number for c in record.finished if c not in absent}

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Note the round's number."""
        self._number = round_index

    def state_dict(self, *, with_round: bool) -> dict[str, Any]:
        """Return both."""
        return {"run": self.run, "rounds": dict(self.rounds)}

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Go on with the run of a checkpoint."""
        if state:
            self.run, self.rounds = state["run"], dict(state["rounds"])
