"""In which round each client counted last: every order says it, so that sites know what to remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import RoundRecord, Stage


class Counted(Stage):
    """Knows in which round each client counted last, which sites have to know.

    Args:
        run: of the run, 32 hexadecimal digits; that of the checkpoint in a resumed one.

    Attributes:
        run: as given.
        rounds: by client; the round of the order, also where its update counted in a later one.
        began: of which round's order those clients' updates are that count in a later one.
    """

    key = "sites"
    traits = NO_TRAITS

    def __init__(self, run: str) -> None:
        self.run = run
        self.rounds: dict[int, int] = {}
        self.began: Mapping[int, int] = {}

    def close(self, record: RoundRecord) -> None:
        """Note whose update was used."""
        absent = {*record.skipped, *record.lost}
        counting = (client for client in record.finished if client not in absent)
        self.rounds |= {client: self.began.get(client, self._number) for client in counting}

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
