"""One client's work."""

from fl_lightning.client.clocks import RecordedArrivals as RecordedArrivals
from fl_lightning.client.corrections.correction import Correction as Correction
from fl_lightning.client.corrections.correction import Outcome as Outcome
from fl_lightning.client.devices import Devices as Devices
from fl_lightning.client.devices import GivenSpeeds as GivenSpeeds
from fl_lightning.client.devices import LogNormalSpeeds as LogNormalSpeeds
from fl_lightning.client.devices import Speeds as Speeds
from fl_lightning.client.devices import SpeedTiers as SpeedTiers
from fl_lightning.core.kinds import exports

__all__ = list(exports(__file__, globals()))
