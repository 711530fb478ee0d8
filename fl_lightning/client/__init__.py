"""One client's work."""

from fl_lightning.client.corrections.correction import Correction, GradientTerm, Outcome
from fl_lightning.client.devices import Devices
from fl_lightning.client.recorded import RecordedArrivals
from fl_lightning.client.speeds import GivenSpeeds, LogNormalSpeeds, Speeds, SpeedTiers

__all__ = [
    "Correction",
    "Devices",
    "GivenSpeeds",
    "GradientTerm",
    "LogNormalSpeeds",
    "Outcome",
    "RecordedArrivals",
    "SpeedTiers",
    "Speeds",
]
