"""Rounds inside Lightning's fit loop."""

from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.simple import SimpleFederation
from fl_lightning.federation.stage import Learning, SpansNetwork, Stage, Start, Turn, Upload

__all__ = [
    "Learning",
    "RoundRecord",
    "Run",
    "SimpleFederation",
    "SpansNetwork",
    "Stage",
    "Start",
    "Turn",
    "Upload",
]
