"""The order in which clients' updates arrived in a run over a network, as a table, and out of it."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from fl_lightning.client.clocks import Ended
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits

FILE = "arrivals.csv"
_COLUMNS = ["round", "client", "version", "seconds", "lost"]


@final
@dataclass(frozen=True, kw_only=True)
class RecordedArrivals:
    """Clients whose updates arrive in the order on record, so that a run over a network is simulated.

    Args:
        file: ``arrivals.csv`` in the folder of that run.

    Raises:
        ConfigurationError: if it cannot be read.
    """

    is_recorded: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        needs={Trait.SIMULATION: "simulates a run that has been"},
        instead={Trait.SIMULATION: "leave devices out"},
    )

    file: str

    def __post_init__(self) -> None:
        self.arrivals()

    def arrivals(self) -> list[Ended]:
        """Return who arrived, in order."""
        try:
            with Path(self.file).open(newline="") as file:
                return [_read(row) for row in csv.DictReader(file)]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"devices: {self.file} is no record of arrivals ({error!r}): take the {FILE} that a run over "
                "a network has written"
            ) from None


def write_arrivals(path: Path, ended: Sequence[Ended], buffer_size: int) -> None:
    """Write down who arrived, and in which round it counted.

    Args:
        path: of the table.
        ended: in order.
        buffer_size: updates per round.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        arrived = 0
        for each in ended:
            numbers = each.client, each.version, f"{each.seconds:.3f}", int(each.is_lost)
            table.writerow([arrived // buffer_size, *numbers])
            arrived += not each.is_lost
    os.replace(partial, path)


def _read(row: dict[str, str]) -> Ended:
    return Ended(
        int(row["client"]), int(row["version"]), float(row["seconds"]), bool(int(row["lost"]))
    )
