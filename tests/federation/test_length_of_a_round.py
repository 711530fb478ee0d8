"""How much of the package a plain round passes through: what somebody reads who follows one.

Profiled: the third round of plain FedAvg through the Trainer, six clients of one epoch each, one after the other.
"""

import itertools
import sys
from pathlib import Path

from lightning.pytorch import Callback
from toys import ToyModule, toy_data, toy_trainer

import fl_lightning
from fl_lightning import Federation

ROOT = str(Path(fl_lightning.__file__).parent)
# They may only fall: to 34, 130 and 250.
MOST_FILES, MOST_FUNCTIONS, MOST_CHANGES_OF_FILE = 52, 265, 711


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
            self.calls.append((code.co_filename, code.co_qualname))


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
