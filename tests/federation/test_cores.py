"""How many processes fit on a machine: cores, not threads, and no more than a container may use."""

import os

import pytest

from fl_lightning.federation.processes.cores import num_usable_cores


def machine(folder, siblings):
    for cpu, text in enumerate(siblings):
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{text}\n")
    return folder


@pytest.fixture
def eight_threads(tmp_path, monkeypatch):
    """Four cores of two threads each, all of which this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return machine(tmp_path / "cpus", ["0,4", "1,5", "2,6", "3,7"] * 2)


def test_two_threads_of_a_core_count_once(eight_threads, tmp_path):
    assert num_usable_cores(eight_threads, tmp_path) == 4


def test_only_what_the_process_may_use_counts(eight_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    assert num_usable_cores(eight_threads, tmp_path) == 2


def test_without_a_description_every_thread_counts(eight_threads, tmp_path):
    assert num_usable_cores(tmp_path / "nothing", tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 4), ("250000", 2), ("100000", 1), ("20000", 1), ("900000", 4)],
)
def test_a_control_groups_limit(eight_threads, tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert num_usable_cores(eight_threads, tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 4), ("200000", 2)])
def test_a_control_groups_limit_of_version_1(eight_threads, tmp_path, quota, cores):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_usable_cores(eight_threads, tmp_path) == cores
