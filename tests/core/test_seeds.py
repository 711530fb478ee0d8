"""Named random streams: pure, distinct, and no trace in the global generators."""

import contextlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import (
    derive_seed,
    numpy_generator,
    preserve_global_generators,
    run_seed,
    seed_global_generators,
    torch_generator,
)

int64 = st.integers(-(2**63), 2**63 - 1)
names = st.sampled_from(["cohort", "shuffle", "", "größe"])
keys = st.tuples(int64, names, st.lists(int64, max_size=3).map(tuple))


def global_draws():
    """Return the next draws of torch, NumPy and Python."""
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


@given(key=keys)
def test_is_a_pure_function_with_63_bits(key):
    root, purpose, ids = key
    seed = derive_seed(root, purpose, *ids)
    assert seed == derive_seed(root, purpose, *ids)
    assert 0 <= seed < 2**63


@given(first=keys, second=keys)
def test_other_arguments_give_another_seed(first, second):
    (root, purpose, ids), (other_root, other_purpose, other_ids) = first, second
    seeds = derive_seed(root, purpose, *ids), derive_seed(other_root, other_purpose, *other_ids)
    assert (seeds[0] == seeds[1]) == (first == second)


def test_name_and_ids_cannot_be_mistaken_for_each_other():
    """The bytes of an id are no part of the name, nor the other way round."""
    letter = int.from_bytes(b"abcdefgh", "little")
    assert derive_seed(0, "abcdefgh") != derive_seed(0, "", letter)
    assert derive_seed(0, "a", letter) != derive_seed(0, "aabcdefgh")


def test_every_bit_of_the_seed_occurs_in_half_of_the_streams():
    seeds = np.array([derive_seed(0, "bits", index) for index in range(4000)])
    share = ((seeds[:, None] >> np.arange(63)) & 1).mean(axis=0)
    np.testing.assert_allclose(share, 0.5, atol=0.04)  # five standard deviations


def test_generators_are_streams_of_their_name():
    streams = [torch.rand(4, generator=torch_generator(0, "x", i)).tolist() for i in (1, 1, 2)]
    assert streams[0] == streams[1] != streams[2]
    draws = [numpy_generator(0, "x", i).random(4).tolist() for i in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(("given_seed", "expected"), [(None, 11), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_the_runs_seed_is_the_default(monkeypatch, given_seed, expected):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    assert run_seed(given_seed) == expected


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_other_seeds_are_refused(seed):
    with pytest.raises(ConfigurationError, match="a whole number from 0 to 2"):
        run_seed(seed)


def test_without_any_seed_it_is_zero(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed(None) == 0


class TestGlobalGenerators:
    @pytest.fixture(autouse=True)
    def _leave_no_trace(self):
        with preserve_global_generators():
            yield

    def test_are_preserved_exactly(self):
        seed_global_generators(1)
        expected = global_draws()
        seed_global_generators(1)
        with contextlib.suppress(KeyError), preserve_global_generators():
            seed_global_generators(2)
            raise KeyError(global_draws())  # an exception changes nothing
        assert global_draws() == expected

    def test_a_gaussian_that_numpy_holds_back_is_preserved(self):
        """Box-Muller gives two numbers a turn: the second is part of the state."""
        np.random.seed(0)
        first = np.random.randn(2).tolist()
        np.random.seed(0)
        found = [np.random.randn()]
        with preserve_global_generators():
            np.random.randn(5)
        assert [*found, np.random.randn()] == first

    @given(seed=st.integers(0, 2**63 - 1))
    def test_all_three_follow_the_seed(self, seed):
        seed_global_generators(seed)
        first = global_draws()
        seed_global_generators(seed)
        assert global_draws() == first
        seed_global_generators(seed ^ 1)
        assert all(a != b for a, b in zip(global_draws(), first, strict=True))

    def test_torch_is_seeded_as_torch_does(self):
        seed_global_generators(5)
        found = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), found)
