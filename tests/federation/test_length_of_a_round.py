"""How much somebody reads who follows a round: its functions and files, and the methods of a stage.

Profiled: the third round of plain FedAvg through the Trainer, six clients of one epoch each, one after the other.
"""

import inspect
import itertools
import re
import sys
from pathlib import Path

from lightning.pytorch import Callback
from toys import ToyModule, toy_data, toy_trainer

import fl_lightning
import fl_lightning.callbacks.local_models
import fl_lightning.flower.server.asynchronous
import fl_lightning.flower.server.remote_clients
import fl_lightning.nas.alpha_optimizer
import fl_lightning.nas.sub_networks.rounds
from fl_lightning import Federation
from fl_lightning.federation import Stage
from fl_lightning.federation.stages import order

ROOT = str(Path(fl_lightning.__file__).parent)
# They may only fall: to 34, 130 and 250. A comprehension is a part of its function, as from Python 3.12 on.
MOST_FILES, MOST_FUNCTIONS, MOST_CHANGES_OF_FILE = 34, 130, 250

COMPREHENSION = re.compile(r"\.<locals>\.<(list|set|dict|gen)(comp|expr)>.*")


class Profiled(Callback):
    """Notes which functions of the package run between the starts of two rounds."""

    def __init__(self):
        self.calls = []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            sys.setprofile(self._note)
        elif trainer.current_epoch == 3:
            sys.setprofile(None)

    def _note(self, frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            self.calls.append((code.co_filename, COMPREHENSION.sub("", code.co_qualname)))


def profiled_round():
    profile, federation = Profiled(), Federation(seed=0, engine="sequential")
    try:
        toy_trainer(federation, profile, max_epochs=4).fit(ToyModule(), datamodule=toy_data())
    finally:
        sys.setprofile(None)
    return profile.calls


def test_a_plain_round_is_short():
    calls = profiled_round()
    files = [file for file, _ in calls]
    changes = sum(one != next_one for one, next_one in itertools.pairwise(files))
    found = len(set(files)), len(set(calls)), changes
    assert found[0] <= MOST_FILES, found
    assert found[1] <= MOST_FUNCTIONS, found
    assert changes <= MOST_CHANGES_OF_FILE, found


def kinds_of_stages(base):
    """All subclasses in the package; the bases of corrections and personal models are no kinds."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("fl_lightning.") and kind.__module__ != Stage.__module__:
            yield kind
        yield from kinds_of_stages(kind)


def test_a_stage_is_slim():
    assert order.stages_of  # all stages of a federation are imported
    methods = [name for name, value in vars(Stage).items() if inspect.isfunction(value)]
    flags = [name for name in vars(Stage)["__annotations__"] if name != "traits"]
    assert len(methods) <= 16
    assert len(flags) <= 5
    kinds = set(kinds_of_stages(Stage))
    serves_one = [m for m in methods if sum(m in vars(kind) for kind in kinds) < 2]
    assert len(serves_one) <= 3, serves_one
