"""The number of slots: the fastest of those tried, remembered in a file that may fail."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.federation.execution.slot_trial import _ratio
from fl_lightning.federation.execution.slot_tuning import Remembered, fastest


@given(st.floats(0, 6), st.integers(0, 5))
def test_the_best_power_of_two_where_there_is_one_valley(best, start):
    def seconds(slots):
        return 1 + abs(math.log2(slots) - best)

    powers = [2**n for n in range(7)]
    found = fastest(lambda slots, other: seconds(slots) / seconds(other), 2**start, most=64)
    assert seconds(found) == min(map(seconds, powers))


def test_the_better_one_of_two_valleys():
    seconds = {1: 5.0, 2: 3.0, 4: 4.0, 8: 2.0, 16: 2.5}
    assert fastest(lambda slots, other: seconds[slots] / seconds[other], 4, most=16) == 8
    seconds |= {8: 3.5, 16: 3.6}
    assert fastest(lambda slots, other: seconds[slots] / seconds[other], 4, most=16) == 2


def test_no_pair_is_measured_twice_and_none_outside_the_bounds():
    measured = []
    fastest(lambda *pair: measured.append(pair) or 0.5, start=3, most=10)
    assert measured == [(1, 3), (6, 3), (10, 6), (10, 1)]
    measured.clear()
    assert fastest(lambda *pair: measured.append(pair) or 1.0, start=3, most=10) == 3
    assert measured == [(1, 3), (6, 3)]


@pytest.mark.parametrize(
    ("seconds", "limit", "turns"),
    [
        ([2.0], 1.0, 5),
        ([0.5], 1.0, 5),
        ([0.8, 1.1, 0.9], 1.0, 15),
        ([0.8, 1.1, 0.9], 0.5, 5),
        ([0.4, 0.6], 0.5, 15),
    ],
)
def test_a_ratio_takes_more_turns_where_it_is_close_to_its_limit(
    seconds, limit, turns, monkeypatch
):
    """One takes these times in turn, the other a second."""
    now, taken = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def run():
        taken.append(seconds[len(taken) % len(seconds)])
        now[0] += taken[-1]

    def run_other():
        now[0] += 1.0

    assert _ratio(run, run_other, limit) == pytest.approx(median(taken))
    assert len(taken) == turns


def test_what_was_found_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "folder" / "slots.json"
    assert Remembered(path).get("a") is None
    Remembered(path).put("a", 8)
    Remembered(path).put("b", 2)
    assert (Remembered(path).get("a"), Remembered(path).get("b")) == (8, 2)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "many"}', '{"a": 0}'])
def test_a_spoilt_file_is_as_good_as_none(tmp_path, content):
    path = tmp_path / "slots.json"
    path.write_text(content)
    assert Remembered(path).get("a") is None
    Remembered(path).put("a", 4)
    assert Remembered(path).get("a") == 4


def test_a_folder_that_cannot_be_made_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    Remembered(tmp_path / "file" / "slots.json").put("a", 4)
    assert Remembered(tmp_path / "file" / "slots.json").get("a") is None
