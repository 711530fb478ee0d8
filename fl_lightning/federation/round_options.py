"""What a round does: the options that its parts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.client.correction import Correction
from fl_lightning.federation.engine import EngineOptions


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """What a round does; the other fields are those of `Federation`.

    Attributes:
        accumulate: batches per local step.
        correction: None for none.
        num_clients: all of them.
        sends_buffers: whether a client sends its buffers with its update.
    """

    local_steps: int | None
    local_epochs: int | None
    accumulate: int
    on_client_failure: Literal["raise", "skip"]
    min_replies: int
    seed: int
    engine: EngineOptions
    correction: Correction | None = None
    num_clients: int
    sends_buffers: bool = True
