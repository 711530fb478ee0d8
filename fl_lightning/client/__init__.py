"""One client's work."""

from fl_lightning.client.devices import Devices
from fl_lightning.client.speeds import GivenSpeeds, LogNormalSpeeds, Speeds, SpeedTiers

__all__ = ["Devices", "GivenSpeeds", "LogNormalSpeeds", "SpeedTiers", "Speeds"]
