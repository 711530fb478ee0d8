"""Columns sorted by a network against NumPy's sort."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.kernels.sort_columns import MOST_ROWS, sorted_columns


def sort(block, first, end):
    out = np.empty((end - first, block.shape[1]), block.dtype)
    sorted_columns(block, first, end, out)
    return out


@given(
    st.integers(1, 130),
    st.integers(1, 200),
    st.sampled_from([np.float32, np.float64]),
    st.tuples(st.integers(0, 129), st.integers(0, 129)),
    st.integers(0, 1000),
)
def test_places_of_the_order(count, width, dtype, places, seed):
    rng = np.random.default_rng(seed)
    block = rng.standard_normal((count, width)).astype(dtype)
    block[rng.random(block.shape) < 0.2] = 0.5  # ties
    first, end = sorted(place % count for place in places)
    expected = np.sort(block, axis=0)[first : end + 1]
    np.testing.assert_array_equal(sort(block, first, end + 1), expected)


@pytest.mark.parametrize("count", range(1, 13))
def test_zeros_and_ones(count):
    """A network that sorts these sorts everything (Knuth, 5.3.4, Theorem Z)."""
    block = np.array(list(product([0.0, 1.0], repeat=count))).T.copy()
    np.testing.assert_array_equal(sort(block, 0, count), np.sort(block, axis=0))
    middle = sort(block, count // 2, count // 2 + 1)
    np.testing.assert_array_equal(middle[0], np.sort(block, axis=0)[count // 2])


def test_more_rows_than_a_network_is_made_for():
    block = np.random.default_rng(0).standard_normal((MOST_ROWS + 1, 3))
    np.testing.assert_array_equal(sort(block, 5, 7), np.sort(block, axis=0)[5:7])
