"""What the tests of runs over sites share."""

import sys

import pytest


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A folder of the test's own, where a run writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
