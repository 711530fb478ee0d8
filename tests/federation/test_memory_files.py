"""Files beside checkpoints: there as long as a checkpoint needs them."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import typed
from toys import ToyModule, toy_data, toy_trainer

from fl_lightning import Federation
from fl_lightning.client.memory import VectorFile
from fl_lightning.federation.checkpoints.files import (
    AtomicCheckpointIO,
    WorkingFolder,
    memory_folder,
)


def test_files_stay_as_long_as_a_checkpoint_needs_them(tmp_path):
    io = AtomicCheckpointIO()
    vectors = [VectorFile.write(torch.full((3,), float(i)), tmp_path / "work") for i in range(4)]

    def save(name, *numbers):
        io.files = lambda: [vectors[i] for i in numbers]
        io.save_checkpoint({}, tmp_path / "checkpoints" / name)

    def there(name):
        folder = memory_folder(tmp_path / "checkpoints" / name)
        return {i for i, file in enumerate(vectors) if (folder / file.path.name).exists()}

    save("last.ckpt", 0, 1)
    save("best.ckpt", 0, 1)
    save("last.ckpt", 1, 2)
    assert (there("last.ckpt"), there("best.ckpt")) == ({1, 2}, {0, 1})
    kept = memory_folder(tmp_path / "checkpoints" / "best.ckpt") / vectors[0].path.name
    assert kept.samefile(vectors[0].path)  # a link, no copy
    assert VectorFile(kept, "float32", 3).read().tolist() == [0, 0, 0]
    io.remove_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    save("last.ckpt")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_files_of_the_one_before(tmp_path):
    io = AtomicCheckpointIO()
    old, new = (VectorFile.write(torch.full((3,), float(i)), tmp_path / "work") for i in range(2))
    io.files = lambda: [old]
    io.save_checkpoint({"round": 1}, tmp_path / "last.ckpt")
    io.files = lambda: [new]
    with pytest.raises(AttributeError, match="local"):
        io.save_checkpoint({"round": lambda: None}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == {"round": 1}
    assert (memory_folder(tmp_path / "last.ckpt") / old.path.name).exists()


def test_a_run_without_such_files_leaves_no_folder(tmp_path):
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_killed_runs_folder_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path):
    first = WorkingFolder(tmp_path)
    mine = first()
    largest = "_4194399_"  # above all process ids
    left = mine.with_name(mine.name.replace(f"_{os.getpid()}_", largest))
    left.mkdir()
    second = WorkingFolder(tmp_path)
    assert second() != mine
    assert mine.is_dir()
    assert not left.exists()
    del first, second
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys, tempfile
from lightning.pytorch import Callback
from toys import ToyModule, toy_data, toy_trainer
from fl_lightning import Federation
from fl_lightning.federation.checkpoints.files import AtomicCheckpointIO

class Killed:
    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

class Saves(Callback):
    def on_train_start(self, trainer, module):
        AtomicCheckpointIO().save_checkpoint({"half": Killed()}, sys.argv[1] + "/best.ckpt")

tempfile.tempdir = sys.argv[2]
trainer = toy_trainer(Federation(), Saves(), devices=2, max_epochs=1)
trainer.fit(ToyModule(), datamodule=toy_data())
"""


def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path, monkeypatch):
    scratch, checkpoints = tmp_path / "scratch", tmp_path / "checkpoints"
    scratch.mkdir()
    (tmp_path / "killed.py").write_text(KILLED)
    words = ["python", str(tmp_path / "killed.py"), str(checkpoints), str(scratch)]
    tests = {"PYTHONPATH": str(Path(__file__).parents[1])}
    said = [tmp_path / "out.txt", tmp_path / "err.txt"]
    process = typed.start(words, tmp_path, os.environ | tests, said)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, said[1].read_text()[-2000:]
    assert len(list(scratch.glob("fl_lightning_*"))) == 1
    assert {path.suffix for path in checkpoints.iterdir()} == {".unfinished"}
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    trainer = toy_trainer(Federation(), devices=2, max_epochs=1)
    trainer.fit(ToyModule(), datamodule=toy_data())
    AtomicCheckpointIO().save_checkpoint({}, checkpoints / "best.ckpt")
    assert not list(scratch.glob("fl_lightning_*"))
    assert [path.name for path in checkpoints.iterdir()] == ["best.ckpt"]
