"""What an attacker learns: audits of a model, those in one run, and inversion of gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn
from torch.nn import functional

from benchmarks.audits.canaries import canary_scores, epsilon_lower_bound
from benchmarks.audits.inversion import (
    GradientSearch,
    cosine,
    first_layer_direction,
    first_layer_input,
    label_of,
)
from benchmarks.audits.one_run_audit import (
    chance_of_guesses,
    epsilon_of_guesses,
    guesses_by_score,
)
from fl_lightning import AllClients, CentralDP
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.mechanism import AccountedRun


def scores(sigma, seed, shift):
    return np.random.default_rng(seed).normal(shift, sigma, 4000)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_below_the_truth(sigma, seed):
    bound = epsilon_lower_bound(scores(sigma, seed, 1), scores(sigma, seed + 100, 0), 1e-5)
    assert bound <= gaussian_epsilon(sigma, 1e-5)


def test_too_little_noise_is_found():
    """Noise of an eighth of what was accounted: the bound exceeds the accounted ε."""
    bound = epsilon_lower_bound(scores(0.5, 0, 1), scores(0.5, 1, 0), 1e-5)
    assert bound > gaussian_epsilon(4.0, 1e-5)


def test_what_is_released_has_the_canary_and_the_noise_that_was_asked_for():
    privacy = CentralDP(clip_norm=0.5, noise_multiplier=2.0)
    run = AccountedRun(AllClients(), num_clients=3, num_rounds=2, seed=0)
    present, absent = (
        canary_scores(privacy, run, has_canary=has, num_worlds=300) for has in (True, False)
    )
    stddev = 2.0 * 0.5 / 3 * math.sqrt(2)
    assert np.std(absent) == pytest.approx(stddev, rel=0.15)
    shift = np.mean(present) - np.mean(absent)  # two rounds of the clip norm, whatever was sent
    assert shift == pytest.approx(2 * 0.5 / 3, abs=5 * stddev * math.sqrt(2 / 300))


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


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5))


def gradients(net, images, labels):
    loss = functional.cross_entropy(net(images), labels)
    return [g.detach() for g in torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("seed", range(5))
def test_one_example_and_its_label_are_exact(seed):
    image = torch.rand(1, 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    weight, bias, _, last = gradients(network(seed), image, torch.tensor([seed]))
    assert torch.allclose(first_layer_input(weight, bias), image.flatten(), atol=1e-5)
    flat = image.flatten()
    assert torch.allclose(first_layer_direction(weight), flat / flat.norm(), atol=1e-5)
    assert label_of(last) == seed


def test_of_noise_rows_are_weighed_by_least_squares():
    generator = torch.Generator().manual_seed(0)
    example, bias = torch.rand(12, generator=generator), torch.randn(9, generator=generator)
    weight = torch.outer(bias, example) + 0.01 * torch.randn(9, 12, generator=generator)
    expected = torch.linalg.lstsq(bias[:, None], weight).solution[0]
    assert torch.allclose(first_layer_input(weight, bias), expected, atol=1e-6)


def test_a_bias_that_did_not_move_gives_nothing():
    assert not first_layer_input(torch.ones(2, 3), torch.zeros(2)).any()


def test_the_search_finds_images_with_the_gradient_and_repeats():
    net = network()
    images = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 4])
    seen = gradients(net, images, labels)
    search = GradientSearch(steps=200, total_variation=0.0)
    found = search(net, seen, labels, (1, 3, 4), seed=1)
    assert float(cosine(gradients(net, found, labels), seen)) > 0.995
    assert torch.equal(found, search(net, seen, labels, (1, 3, 4), seed=1))
    assert 0 <= found.min() <= found.max() <= 1
