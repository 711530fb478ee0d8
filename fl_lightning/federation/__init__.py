"""Rounds inside Lightning's fit loop."""

from fl_lightning.federation.plain_rounds import plain_rounds
from fl_lightning.federation.processes.remote_error import ProcessTraceback
from fl_lightning.federation.round_log import begin_round, logged_in_round
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Sent, Stage, Start, Turn
from fl_lightning.federation.visits.local_counts import client_id, local_step

__all__ = [
    "ProcessTraceback",
    "RoundRecord",
    "Run",
    "Sent",
    "Stage",
    "Start",
    "Turn",
    "begin_round",
    "client_id",
    "local_step",
    "logged_in_round",
    "plain_rounds",
]
