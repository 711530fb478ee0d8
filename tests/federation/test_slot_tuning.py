"""The number of slots: the fastest of those tried, remembered in a file that may fail."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.federation.slot_tuning import Remembered, fastest


@given(st.floats(0, 6), st.integers(0, 5))
def test_the_best_power_of_two_where_there_is_one_valley(best, start):
    def seconds(slots):
        return abs(math.log2(slots) - best)

    powers = [2**n for n in range(7)]
    found = fastest(seconds, 2**start, most=64)
    assert seconds(found) == min(map(seconds, powers))


def test_no_number_is_tried_twice_and_none_outside_the_bounds():
    tried = []
    fastest(lambda slots: tried.append(slots) or -slots, start=3, most=10)
    assert tried == [3, 1, 6]


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
