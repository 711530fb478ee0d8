"""What a round does: the options that its parts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.devices import Fleet
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.federation.execution.engine_options import EngineOptions
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.older_models import Versions
from fl_lightning.updates.path import Step
from fl_lightning.updates.transform import UpdateTransform


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """What a round does; the other fields are those of `Federation`.

    Attributes:
        accumulate: batches per local step.
        correction: None for none.
        personal: None for none.
        num_clients: all of them.
        client_memory_bytes: of what clients remember, kept in RAM.
        fleet: the clients' devices, for virtual time; None if there is none.
        versions: of the model that clients begin from; None if all begin from the present one.
        examples: makes local steps private; None if they are not.
    """

    local_steps: int | None
    local_epochs: int | None
    accumulate: int
    on_client_failure: Literal["raise", "skip"]
    min_replies: int
    seed: int
    engine: EngineOptions
    correction: Correction | None = None
    personal: Personalisation | None = None
    num_clients: int
    client_memory_bytes: float
    updates: Sequence[Step] = ()
    download: Sequence[UpdateTransform] = ()
    fleet: Fleet | None = None
    versions: Versions | None = None
    examples: ExampleRounds | None = None
    client_state: Sequence[str] = ()
