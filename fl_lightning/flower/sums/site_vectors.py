"""What a site keeps on its disk of secure sums: its clients' vectors of a round, and what it has told.

A server that is killed begins the sum of a round again. It learns one sum of a round, whatever it says:
a client that has helped to open the sum of some survivors helps with no other of that round. Two sums
over different survivors would differ by the vectors of a few. To open one, more than half of a cohort
must help, so two disjoint halves cannot open two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.flower.failures import OrderRefused
from fl_lightning.secure.protocol.client import UsedRounds
from fl_lightning.secure.ring import RingIntegers


class SiteVectors:
    """Keeps them.

    Args:
        folder: of one run at a site.

    Attributes:
        round: whose vectors there are; -1 if there are none.
        vectors: by client.
        rules: of the sum, by the configuration, see `rules_of`.
        used: in which rounds of the protocol clients have taken part, by client.
    """

    def __init__(self, folder: Path) -> None:
        self._vectors_file, self._told_file = folder / "vectors.npz", folder / "sums.json"
        self.round = -1
        self.vectors: dict[int, RingIntegers] = {}
        self.rules: Mapping[str, Any] = {}
        self.used: dict[int, UsedRounds] = {}
        self._told: dict[str, Any] = {"round": -1, "clients": None, "opened": {}}
        self._recall()

    def keep(
        self, round_index: int, vectors: Mapping[int, RingIntegers], rules: Mapping[str, Any]
    ) -> None:
        """Write down the vectors of a round, ahead of the answer that says that they are there."""
        content = BytesIO()
        arrays: dict[str, Any] = {str(client): vector for client, vector in vectors.items()}
        told = json.dumps({"round": round_index, "rules": dict(rules)})
        np.savez(content, told=np.array(told), **arrays)
        write_whole(self._vectors_file, content.getvalue())
        self.round, self.vectors, self.rules = round_index, dict(vectors), rules

    def begin(self, clients: Iterable[int], own: Iterable[int]) -> None:
        """Note who takes part in the round's sum, before a first key leaves.

        Raises:
            OrderRefused: if it was a sum of others that this round began with.
        """
        cohort = list(clients)
        if self._told["round"] != self.round:
            self._told = {"round": self.round, "clients": cohort, "opened": {}}
        elif self._told["clients"] != cohort:
            raise OrderRefused(
                "sum", f"round {self.round} began with a sum of {self._told['clients']}"
            )
        for client in own:
            self.used.setdefault(client, UsedRounds())
        self._write_told()

    def open(self, client: int, survivors: Iterable[int]) -> None:
        """Note whose sum a client helps to open, before it does.

        Raises:
            OrderRefused: if it has helped with another one of this round.
        """
        asked = sorted(survivors)
        opened = self._told["opened"].setdefault(str(client), asked)
        if opened != asked:
            raise OrderRefused(
                "sum", f"client {client} opened the sum of {opened}, and is asked for {asked}"
            )
        self._write_told()

    def note_used(self) -> None:
        """Write down which rounds of the protocol were used, before a message of them leaves."""
        self._write_told()

    def _write_told(self) -> None:
        used = {str(client): each.state_dict() for client, each in self.used.items()}
        write_whole(self._told_file, json.dumps(self._told | {"used": used}).encode())

    def _recall(self) -> None:
        if self._vectors_file.exists():
            with np.load(self._vectors_file, allow_pickle=False) as kept:
                told = json.loads(str(kept["told"]))
                self.round, self.rules = told["round"], told["rules"]
                self.vectors = {int(name): kept[name] for name in kept.files if name != "told"}
        if self._told_file.exists():
            self._told = json.loads(self._told_file.read_text())
            for client, state in self._told.pop("used").items():
                self.used[int(client)] = used = UsedRounds()
                used.load_state_dict(state)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    with partial.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
