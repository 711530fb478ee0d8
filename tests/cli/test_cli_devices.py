"""``devices: auto`` on the command line: every core where clients train on CPUs, else one process."""

import os

import pytest
from toys import toy_data

from fl_lightning import Federation, PoissonCohort, UniformCohort
from fl_lightning.cli.devices import automatic_processes
from fl_lightning.federation.processes.fork import can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
OPEN = {
    "accelerator": "cpu",
    "devices": "auto",
    "num_nodes": 1,
    "strategy": "auto",
    "plugins": None,
    "fast_dev_run": False,
    "limit_train_batches": None,
}


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    monkeypatch.setattr("fl_lightning.cli.devices.num_usable_cores", lambda: 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def processes(trainer=(), num_threads=None, cohort=None):
    return automatic_processes(
        OPEN | dict(trainer), Federation(cohort=cohort), toy_data(6), num_threads
    )


def test_all_cores():
    assert processes() == 3
    assert processes(num_threads=1) == 3
    assert processes({"strategy": "federated"}) == 3


@pytest.mark.parametrize(
    ("cohort", "limit", "expected"),
    [
        (UniformCohort(size=2), None, 2),
        (PoissonCohort(fraction=0.1), None, 1),
        (None, 2, 2),
        (None, 0.5, 3),
        (None, 0.2, 1),
    ],
)
def test_no_more_than_clients_in_a_round(cohort, limit, expected):
    assert processes({"limit_train_batches": limit}, cohort=cohort) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"devices": 1},
        {"devices": "2"},
        {"accelerator": "gpu"},
        {"num_nodes": 2},
        {"strategy": "ddp"},
        {"fast_dev_run": True},
        {"plugins": ["something"]},
    ],
)
def test_what_the_user_says_stays(given):
    assert processes(given) == 1


def test_several_threads_that_were_asked_for_stay():
    assert processes(num_threads=2) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "1"},
        {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "x", "JSM_NAMESPACE_LOCAL_RANK": "0"}
        | {"JSM_NAMESPACE_SIZE": "1"},
    ],
)
def test_processes_that_others_started_are_taken_as_they_are(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    assert processes() == 1
