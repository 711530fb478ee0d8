"""The table of strange modules in two processes.

In a file of its own: a process is divided before anything in it was compiled, so these come first.
"""

import pytest

from strange.test_strange_modules import TRAINED, assert_as_expected, run


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "slots"])
@pytest.mark.parametrize("name", [name for name, row in TRAINED.items() if not row.is_slow])
def test_two_processes(name, engine):
    assert_as_expected(name, run(TRAINED[name], engine, devices=2))
