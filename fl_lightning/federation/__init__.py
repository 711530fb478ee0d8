"""Rounds inside Lightning's fit loop."""

from fl_lightning.federation.logs import begin_round, log_numbers, logged_in_round
from fl_lightning.federation.processes.fork import ProcessTraceback
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.simple import SimpleFederation
from fl_lightning.federation.stage import Learning, SpansNetwork, Stage, Start, Turn, Upload
from fl_lightning.federation.visits.local_counts import client_id, local_step

__all__ = [
    "Learning",
    "ProcessTraceback",
    "RoundRecord",
    "Run",
    "SimpleFederation",
    "SpansNetwork",
    "Stage",
    "Start",
    "Turn",
    "Upload",
    "begin_round",
    "client_id",
    "local_step",
    "log_numbers",
    "logged_in_round",
]
