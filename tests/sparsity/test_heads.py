"""Heads fitted on frozen features: scikit-learn's, and the same however examples are divided."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from torch import nn

from fl_lightning import ConfigurationError
from fl_lightning.sparsity import LinearHead, RidgeHead, head_features

IMAGES, CLASSES = load_digits(return_X_y=True)
X, Y = torch.from_numpy(IMAGES[:200] / 16).float(), torch.from_numpy(CLASSES[:200])


CASES = pytest.mark.parametrize(("strength", "has_bias"), [(1.0, True), (10.0, False)])


@CASES
def test_ridge_is_scikit_learns(strength, has_bias):
    theirs = Ridge(alpha=strength, fit_intercept=has_bias).fit(X.double(), np.eye(10)[Y])
    ours = RidgeHead(regularisation=strength).fit([(X, Y)], 64, 10, has_bias=has_bias)
    np.testing.assert_allclose(ours.weight, theirs.coef_, atol=1e-8)
    assert (ours.bias is not None) == has_bias
    if has_bias:
        np.testing.assert_allclose(ours.bias, theirs.intercept_, atol=1e-8)


@CASES
def test_logistic_regression_is_scikit_learns(strength, has_bias):
    theirs = LogisticRegression(
        C=1 / strength, fit_intercept=has_bias, tol=1e-10, max_iter=5000, solver="newton-cg"
    )
    theirs.fit(X.double(), Y)
    exact = LinearHead(regularisation=strength, tolerance=1e-8, max_iterations=1000)
    ours = exact.fit([(X, Y)], 64, 10, has_bias=has_bias)
    np.testing.assert_allclose(ours.weight, theirs.coef_, atol=1e-4)
    if has_bias:  # which is free up to a constant
        ours_bias = ours.bias - ours.bias.mean()
        np.testing.assert_allclose(
            ours_bias, theirs.intercept_ - theirs.intercept_.mean(), atol=1e-4
        )


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 200), max_size=5))
@pytest.mark.parametrize("fit", [RidgeHead(), LinearHead(regularisation=5.0, max_iterations=15)])
def test_the_division_of_the_examples_does_not_matter(fit, cuts):
    places = [0, *sorted(cuts), 200]
    owners = [(X[a:b], Y[a:b]) for a, b in pairwise(places)]
    one, many = fit.fit([(X, Y)], 64, 10), fit.fit(owners, 64, 10)
    torch.testing.assert_close(many.weight, one.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(many.bias, one.bias, rtol=0, atol=1e-6)


def test_temperature_scales_logits():
    one, half = (RidgeHead(temperature=t).fit([(X, Y)], 64, 10) for t in (1.0, 0.5))
    assert torch.equal(2 * one.weight, half.weight)
    assert torch.equal(2 * one.bias, half.bias)


def test_what_a_client_sends():
    assert RidgeHead().fit([(X, Y)], 64, 10).values_up == 65 * 66 // 2 + 65 * 10
    fitted = LinearHead(max_iterations=3).fit([(X, Y)], 64, 10)
    assert fitted.values_up == 65 * 10 + 2
    assert 3 <= fitted.rounds <= 12


def test_features_are_the_heads_input():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
    found = head_features(network, network[3], (X[:7], Y[:7]), lambda m, b: m(b[0]))
    assert torch.equal(found, network[:3](X[:7]))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda: RidgeHead().fit([(X, Y)], 64, 9), "labels are 0 to 9, but the head has 9 classes"),
        (
            lambda: head_features(
                nn.Sequential(nn.Linear(64, 2)), nn.Linear(2, 2), (X, Y), lambda m, b: m(b[0])
            ),
            "called on tensors of shapes",
        ),
    ],
)
def test_refusals(what, says):
    with pytest.raises(ConfigurationError, match=says):
        what()
