"""Means with noise: closed forms and reductions, adaptive clipping, options."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import ConfigurationError, Mean
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.central import CentralDP
from fl_lightning.privacy.private_mean import (
    AdaptiveClip,
    PrivateMean,
    clipped,
    update_noise_multiplier,
)

vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3).map(torch.tensor)
norms = st.floats(1e-3, 1e4)


def update(delta, num_examples=1):
    return ClientUpdate(0, torch.as_tensor(delta), torch.empty(0), num_examples, 1)


def fold(mean, deltas, clip_norm=math.inf):
    mean.clip_norm = clip_norm
    mean.open(torch.empty(3))
    for n, delta in enumerate(deltas, start=1):
        mean.add(update(delta, n))
    return mean.close()


@given(delta=vectors, clip_norm=norms)
def test_clipping_never_grows_a_norm_and_keeps_the_direction(delta, clip_norm):
    short, is_within = clipped(delta, clip_norm)
    assert float(short.double().norm()) <= min(clip_norm, float(delta.double().norm())) * (1 + 1e-6)
    assert bool(is_within) == (float(delta.double().norm()) <= clip_norm)
    if is_within:
        assert torch.equal(short, delta)
    else:
        expected = delta.double() / delta.double().norm() * clip_norm
        assert torch.allclose(short.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("exact", [False, True])
@given(deltas=st.lists(vectors, min_size=1, max_size=6))
def test_unclipped_with_everybody_it_is_the_plain_mean_to_the_bit(deltas, exact):
    plain = Mean(weight_by_examples=False, exact=exact)
    plain.open(torch.empty(3))
    for delta in deltas:
        plain.add(update(delta, 7))
    assert torch.equal(fold(PrivateMean(len(deltas), exact), deltas), plain.close())


@given(
    deltas=st.lists(vectors, min_size=1, max_size=6),
    other=vectors,
    clip_norm=norms,
    expected=st.integers(1, 50),
)
def test_one_client_moves_the_sum_by_the_clip_norm_at_most(deltas, other, clip_norm, expected):
    without = fold(PrivateMean(expected), deltas, clip_norm)
    with_it = fold(PrivateMean(expected), [*deltas, other], clip_norm)
    replaced = fold(PrivateMean(expected), [*deltas[:-1], other], clip_norm)
    slack = 1e-5 * (1 + clip_norm * len(deltas))
    assert float((with_it - without).norm()) * expected <= clip_norm + slack
    assert float((replaced - without).norm()) * expected <= 2 * clip_norm + slack


def test_sums_of_several_processes_add_up():
    deltas = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    parts = [PrivateMean(5, exact=True), PrivateMean(5, exact=True)]
    fold(parts[0], deltas[:2], 0.7)
    fold(parts[1], deltas[2:], 0.7)
    parts[0].load_sums([a + b for a, b in zip(parts[0].sums(), parts[1].sums(), strict=True)])
    whole = PrivateMean(5, exact=True)
    assert torch.equal(parts[0].close(), fold(whole, deltas, 0.7))
    assert (
        parts[0].num_unclipped == whole.num_unclipped == sum(float(d.norm()) <= 0.7 for d in deltas)
    )


def test_an_adaptive_norm_settles_where_half_of_the_norms_are_within():
    norm = 0.1
    for _ in range(400):  # norms are 1
        norm = AdaptiveClip().next_norm(norm, unclipped=float(norm >= 1))
    assert norm == pytest.approx(1.0, rel=0.11)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clip_norm": math.inf, "noise_multiplier": 1.0}, "clip_norm, which is inf"),
        ({"clip_norm": math.inf, "epsilon": 3.0}, "clip_norm, which is inf"),
        ({"clip_norm": 1.0}, "needs noise_multiplier"),
    ],
)
def test_options_out_of_range(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        CentralDP(**options)


def test_too_little_noise_on_the_count_is_refused():
    with pytest.raises(ConfigurationError, match=r"must be above 0\.5"):
        update_noise_multiplier(1.0, bits_stddev=0.5)


GIVEN = {"clip_norm": 0.5, "noise_multiplier": 1.0}


def test_an_adaptive_clip_may_be_given_by_its_options_alone():
    options = {"quantile": 0.25, "bits_stddev": 2.0}
    assert CentralDP(**GIVEN, adaptive_clip=options).adaptive_clip == AdaptiveClip(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"quantil": 0.5}, "takes .*quantile.*got quantil"), ({"quantile": 2}, "2")],
)
def test_options_that_an_adaptive_clip_has_not_are_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        CentralDP(**GIVEN, adaptive_clip=options)
