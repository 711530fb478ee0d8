"""One-run audits: the bound against exact sums and against mechanisms of known ε."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from benchmarks.audits.one_run_audit import (
    chance_of_guesses,
    epsilon_of_guesses,
    guesses_by_score,
)
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon


@given(guesses=st.integers(1, 60), right=st.integers(0, 60), epsilon=st.floats(0, 5))
def test_without_delta_it_is_the_binomial_tail(guesses, right, epsilon):
    right = min(right, guesses)
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = sum(
        math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(right, guesses + 1)
    )
    assert chance_of_guesses(right, guesses, 100, epsilon, 0.0) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize(("right", "guesses", "canaries"), [(30, 40, 100), (95, 100, 1000)])
def test_delta_adds_its_steepest_term(right, guesses, canaries):
    epsilon, delta = 1.0, 1e-4
    q = 1 / (1 + math.exp(-epsilon))
    mass = [binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    steepest = max(sum(mass[right - i : right]) / i for i in range(1, right + 1))
    expected = sum(mass[right:]) + 2 * canaries * delta * steepest
    assert chance_of_guesses(right, guesses, canaries, epsilon, delta) == pytest.approx(expected)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_the_bound_is_wrong_in_no_more_than_a_twentieth_of_the_runs(epsilon):
    """Randomised response reaches the bound: each guess is right with chance e^ε / (1 + e^ε)."""
    q = 1 / (1 + math.exp(-epsilon))
    right = np.random.default_rng(0).binomial(200, q, size=400)
    bound = {int(v): epsilon_of_guesses(int(v), 200, 200, 0.0) for v in set(right)}
    bounds = np.array([bound[int(v)] for v in right])
    assert (bounds > epsilon).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert np.median(bounds) > epsilon - 0.45


@pytest.mark.parametrize("sigma", [0.6, 1.1, 3.0])
def test_noise_is_seen_as_no_more_than_it_is(sigma):
    generator = np.random.default_rng(1)
    for _ in range(5):
        is_in = generator.random(2000) < 0.5
        scores = is_in + sigma * generator.normal(size=2000)
        bound = guesses_by_score(scores, is_in, 0.2).epsilon(1e-5)
        truth = gaussian_epsilon(sigma, 1e-5)
        assert bound <= truth
        assert sigma > 2 or bound > 0.25 * truth
    bare = guesses_by_score(is_in.astype(float), is_in, 0.2)
    assert bare.right == bare.guesses == 400
    assert bare.epsilon(1e-5) > 4.5
