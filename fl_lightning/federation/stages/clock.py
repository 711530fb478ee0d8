"""The devices of a run, and, where the server waits for nobody, who arrives when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.client.clocks import VirtualClock
from fl_lightning.client.devices import Devices, Fate, Fleet
from fl_lightning.federation.stage import Stage
from fl_lightning.federation.stages.devices import SimulatedDevices
from fl_lightning.federation.stages.older_models import StaleUpdates, Versions
from fl_lightning.federation.stages.schedule import Arrivals, ArrivingCohort, UnknownCohort
from fl_lightning.server.staleness import AsyncRule


@dataclass(frozen=True)
class VirtualTime:
    """What is simulated of time.

    Attributes:
        fleet: the clients' devices; None if time is not simulated.
        rule: how stale updates count; None if the server waits for its cohort.
        arrivals: who arrives when; None likewise.
    """

    fleet: Fleet | None = None
    rule: AsyncRule | None = None
    arrivals: Arrivals | None = None

    @classmethod
    def of(
        cls,
        devices: Devices | None,
        rule: AsyncRule | None,
        num_steps: npt.NDArray[np.int64],
        seed: int,
    ) -> VirtualTime:
        """Return the time of a run.

        Args:
            devices: what clients train on.
            rule: of an asynchronous server.
            num_steps: local steps of each client's round, shape (num_clients,).
            seed: root seed.
        """
        if devices is None:
            return cls()
        fleet = Fleet(devices, len(num_steps), seed)
        if rule is None:
            return cls(fleet)

        def fate_of(client: int, start: int) -> Fate:
            return fleet.fate(client, max(1, int(num_steps[client])), draw=start)

        counts = len(num_steps), rule.concurrency, rule.buffer_size
        return cls(fleet, rule, Arrivals(VirtualClock(fate_of), *counts, seed))

    def who_sends(self, accumulate: int) -> list[Stage]:
        """Return what decides whose updates come, and of which model.

        Args:
            accumulate: batches per local step.
        """
        if self.arrivals is not None:
            return [Versions(self.arrivals)]
        return [] if self.fleet is None else [SimulatedDevices(self.fleet, accumulate)]

    def how_it_counts(self) -> list[Stage]:
        """Return what weighs updates that arrive."""
        return [] if self.rule is None else [StaleUpdates(self.rule)]

    @property
    def cohort(self) -> ArrivingCohort | None:
        """Whose updates arrive for each step of an asynchronous server."""
        if self.rule is None or self.arrivals is None:
            return None
        return ArrivingCohort(self.arrivals, self.rule.buffer_size)
