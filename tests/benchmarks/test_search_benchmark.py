"""The benchmark of searches: what it trains from scratch learns; the bar itself is a slow test."""

from statistics import mean, median

import pytest

from benchmarks.search import results, retrained

CELL = "|none~0|+|nor_conv_3x3~0|none~1|+|nor_conv_3x3~0|skip_connect~1|nor_conv_3x3~2|"
NOTHING = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"


def test_a_cell_learns_and_an_empty_one_does_not():
    assert retrained(CELL, 0, epochs=2, channels=4) > 0.5
    assert retrained(NOTHING, 0, epochs=1, channels=4) < 0.2


def test_training_is_a_function_of_the_seed():
    first, second, other = (retrained(CELL, seed, epochs=1, channels=4) for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.slow
def test_the_quickstarts_cells_beat_random_ones():
    found = list(results([0, 1, 2], num_random=10, epochs=3, options=[]))
    assert mean(r.found for r in found) > mean(median(r.random) for r in found)
    assert all(r.seconds / 2 < 150 for r in found)
