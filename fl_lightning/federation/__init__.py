"""Rounds inside Lightning's fit loop."""

from fl_lightning.federation.plain_rounds import plain_rounds
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Learning, SpansNetwork, Stage, Start, Turn, Upload

__all__ = [
    "Learning",
    "RoundRecord",
    "Run",
    "SpansNetwork",
    "Stage",
    "Start",
    "Turn",
    "Upload",
    "plain_rounds",
]
