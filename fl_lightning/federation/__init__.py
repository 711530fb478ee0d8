"""Rounds inside Lightning's fit loop.

This is the room's door: what other rooms use stands here, and they import nothing past it.
"""

from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.checkpoints.files import LAST, AtomicCheckpointIO
from fl_lightning.federation.checkpoints.memory import RunMemory
from fl_lightning.federation.checkpoints.resumption import (
    check_checkpoint,
    clean_up_after,
    find_run,
    keep_rows,
    settle_folder,
    settle_loggers,
)
from fl_lightning.federation.checkpoints.run_folder import (
    CONFIG,
    EarlierRun,
    checkpoint_folders,
    differences,
    newest_checkpoint,
    own_run_folder,
    run_folder,
    run_of,
)
from fl_lightning.federation.checks.fit import NETWORK, check_strategy, network_parts
from fl_lightning.federation.checks.privacy import shown_by
from fl_lightning.federation.clients.fit_clients import FitClients
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.groups import ClientGroup, limited
from fl_lightning.federation.hooks import overrides
from fl_lightning.federation.logs import (
    begin_round,
    board_tag,
    boards,
    is_of_test,
    keep_once,
    log_figure,
    log_histogram,
    log_numbers,
    log_once,
    logged_in_round,
    logged_once,
    table,
)
from fl_lightning.federation.loop import plan_rounds, set_round, training_loader
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.fork import ProcessTraceback, can_fork, num_usable_cores
from fl_lightning.federation.processes.interruption import Interruption, interruptible
from fl_lightning.federation.processes.ranks import Ranks, shares
from fl_lightning.federation.processes.strategy import FederatedStrategy
from fl_lightning.federation.round import Transaction
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.simple import SimpleFederation
from fl_lightning.federation.stage import (
    Learning,
    Missing,
    Processes,
    SpansNetwork,
    Stage,
    Stages,
    Start,
    Turn,
    Upload,
    check_same,
)
from fl_lightning.federation.stages.asynchrony import Arrivals, KeptVersions
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.federation.stages.client_masks import MaskOfClient
from fl_lightning.federation.stages.secure_rounds import SecureRounds
from fl_lightning.federation.stages.transport import Transport
from fl_lightning.federation.start import begin_at_site, check_begun, prepare, take_over
from fl_lightning.federation.visits.client_visits import (
    PERSONAL,
    ClientExamples,
    chosen_clients,
    common_test_examples,
    evaluate_clients,
    evaluated_clients,
    held_out_examples,
)
from fl_lightning.federation.visits.local_counts import client_id, local_step
from fl_lightning.federation.visits.personal_models import (
    PersonalModels,
    personal_models,
    recalled_models,
)
from fl_lightning.federation.visits.visiting import StepOf, Visit, visiting

__all__ = [
    "CONFIG",
    "LAST",
    "NETWORK",
    "PERSONAL",
    "Arrivals",
    "AtomicCheckpointIO",
    "Attackers",
    "Calendar",
    "ClientExamples",
    "ClientGroup",
    "EarlierRun",
    "FederatedStrategy",
    "Federation",
    "FitClients",
    "Interruption",
    "KeptVersions",
    "Learning",
    "MaskOfClient",
    "Missing",
    "Options",
    "PersonalModels",
    "ProcessTraceback",
    "Processes",
    "Ranks",
    "RoundRecord",
    "Run",
    "RunMemory",
    "SecureRounds",
    "SimpleFederation",
    "SpansNetwork",
    "Stage",
    "Stages",
    "Start",
    "StepOf",
    "Transaction",
    "Transport",
    "Turn",
    "Upload",
    "Visit",
    "begin_at_site",
    "begin_round",
    "board_tag",
    "boards",
    "can_fork",
    "check_begun",
    "check_checkpoint",
    "check_same",
    "check_strategy",
    "checkpoint_folders",
    "chosen_clients",
    "clean_up_after",
    "client_id",
    "common_test_examples",
    "differences",
    "evaluate_clients",
    "evaluated_clients",
    "find_run",
    "held_out_examples",
    "interruptible",
    "is_of_test",
    "keep_once",
    "keep_rows",
    "limited",
    "local_step",
    "log_figure",
    "log_histogram",
    "log_numbers",
    "log_once",
    "logged_in_round",
    "logged_once",
    "network_parts",
    "newest_checkpoint",
    "num_usable_cores",
    "overrides",
    "own_run_folder",
    "personal_models",
    "plan_rounds",
    "prepare",
    "recalled_models",
    "run_folder",
    "run_of",
    "set_round",
    "settle_folder",
    "settle_loggers",
    "shares",
    "shown_by",
    "table",
    "take_over",
    "training_loader",
    "visiting",
]
