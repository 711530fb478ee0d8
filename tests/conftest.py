"""What all tests share."""

import functools
import gc
import importlib.metadata
import logging
import os
import sys

gc.disable()  # nothing that an import or the collection makes is garbage, and to look at it takes 10 s

# Lightning calls jsonargparse by names that it has renamed: not ours to mend
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors gain nothing from more, see below
# Tests start Python dozens of times: without bytecode each start compiles every library for 10 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Each Trainer asks all 200 distributions for callbacks of theirs: 8 ms, some thousand times
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

# Ahead of all others: of Optional[Union[int, float]] and Optional[Union[float, int]] typing keeps the one
# that a process has met first, and by the second the command line takes 3 batches for 3.0
import lightning.pytorch  # noqa: F401, I001
import hypothesis
import numpy as np
import pytest
import torch

# Lightning keeps its messages from the root logger, thus from `caplog`, unless that has handlers by now;
# it depends on pytest's version whether it has.
logging.getLogger("lightning.pytorch").propagate = True

# How long an example takes says more about the machine than about the code; every run draws new ones.
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=50)
hypothesis.settings.load_profile("any machine")

# On a busy machine two threads wait for each other: some tests took twenty times as long.
torch.set_num_threads(1)


# They take minutes: no worker should be left with them at the end.
FIRST = (
    *("test_readme_session", "test_engines", "test_spot_check", "test_personalisation"),
    *("test_manual_optimization", "test_notebooks", "test_configs", "test_privacy", "test_cli"),
    *("test_processes", "test_strange_modules"),
)


def pytest_collection_modifyitems(items):
    """Begin with those files, in their order."""
    places = {stem: place for place, stem in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """Have no collection of garbage walk through the libraries and the tests themselves."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # some libraries count what is left at the exit


@pytest.fixture(autouse=True)
def _a_level_of_ones_own():
    """Have no test leave another one the level at which it wants to read Lightning's log."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _no_global_seed():
    """Keep the seed that `seed_everything` leaves in the environment from the next test."""
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture
def global_generators_stay():
    """Fail a test that draws from NumPy's or torch's global generator."""
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    yield
    np.testing.assert_array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    """Each test types its commands in a folder of its own; the processes that they start find the toys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    tests = os.path.dirname(__file__)
    monkeypatch.setenv("PYTHONPATH", f"{os.path.dirname(tests)}:{tests}")
