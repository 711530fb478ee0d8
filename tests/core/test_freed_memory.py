"""Freed memory stays with the process."""

import os
import subprocess
import sys

import pytest

from fl_lightning.core.freed_memory import keep_freed_memory

FAULTS = """
import resource, torch
from fl_lightning.core.freed_memory import keep_freed_memory
keep_freed_memory()
def step():
    blocks = [torch.ones(5_000_000) for _ in range(4)]
faults = []
for _ in range(20):
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-6])
"""


def page_faults(**environment):
    """Return those of five steps, after some others, that allocate and free 80 MB each."""
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
