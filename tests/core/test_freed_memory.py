"""Freed memory stays with the process."""

import ctypes
import os
import subprocess
import sys

import pytest
import typed

from fl_lightning.core.processes import keep_freed_memory

FAULTS = """
import resource, torch
from fl_lightning.core.processes import keep_freed_memory
keep_freed_memory()
def step():
    blocks = [torch.ones(size) for size in (5_000_000, 11_000_000)]
faults = []
for _ in range(20):
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-6])
"""

# A block comes out of the heap, and is not the system's own, only where the library was told so.
FIT = """
import ctypes, sys, torch
from lightning.pytorch import Trainer
from fl_lightning import FederatedDataModule, Federation
from toys import ToyData, ToyModule
class Info(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(10)]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
callbacks = [Federation(local_steps=1)] if sys.argv[1] == "federation" else []
data = FederatedDataModule(ToyData(), num_clients=2) if callbacks else ToyData()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet).fit(ToyModule(), data)
before = getattr(library.mallinfo2(), "4")  # bytes in blocks of the system's own
block = torch.empty(60 * 2**20, dtype=torch.uint8)
print(getattr(library.mallinfo2(), "4") - before)
"""


def page_faults(**environment):
    """Return those of five steps, after some others, that allocate and free 64 MB each, one block of 44 MB among them."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(run.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="another C library, or told otherwise")
def test_steps_get_the_same_memory_again():
    # every block is the system's own, and what the user wants goes first
    returned = page_faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert returned > 50_000
    assert page_faults() < returned / 20


@pytest.mark.skipif(not keep_freed_memory(), reason="another C library, or told otherwise")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a library before 2.33")
@pytest.mark.parametrize("kind", ["federation", "plain"])
def test_a_federation_on_a_cpu_keeps_freed_memory(kind, tmp_path):
    own = int(typed.said_by(FIT, kind, folder=tmp_path)[0].split()[-1])
    assert own == 0 if kind == "federation" else own >= 60 * 2**20
