"""The grid of what is released: powers of two, bounded vectors, exact sums."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noise_of, noisy
from fl_lightning.privacy.noise.noise_source import SeededNoise
from fl_lightning.privacy.private_mean import PrivateMean

norms = st.floats(1e-6, 1e6)


def draw(*ids):
    return SeededNoise(0).stream(*ids)


@given(clip_norm=norms, size=st.sampled_from([0, 1, 100, 10**6, 22 * 10**6, 10**9]))
def test_steps_are_powers_of_two_and_cost_next_to_nothing(clip_norm, size):
    grid = Grid.of(clip_norm, size)
    assert math.frexp(grid.step)[0] == 0.5
    assert grid.radius >= max(2.0**26, 2.0**14 * math.sqrt(size))
    assert grid.radius < 2 * max(2.0**26, 2.0**14 * math.sqrt(size)) * (1 + 1e-9)


@given(
    vector=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5).map(torch.tensor),
    clip_norm=norms,
)
def test_no_vector_is_longer_than_accounted_for(vector, clip_norm):
    steps = Grid.of(clip_norm, len(vector)).to_steps(vector, draw())
    exact = math.sqrt(sum(int(step) ** 2 for step in steps))
    assert exact * Grid.of(clip_norm, len(vector)).step <= clip_norm * GRID_COST


def test_rounding_is_right_in_expectation_and_within_a_step():
    grid, vector = Grid(clip_norm=10.0, step=1.0), torch.tensor([0.25, -2.75, 3.0])
    rounded = np.stack([grid.to_steps(vector, draw(i)) for i in range(4000)])
    assert np.abs(rounded - vector.numpy()).max() < 1
    spread = rounded.std(0) / math.sqrt(4000)
    assert (np.abs(rounded.mean(0) - vector.numpy()) <= 5 * spread).all()


def test_what_is_released_are_multiples_of_the_step_in_single_precision_too():
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sent = noisy(vector, 1.0, 20.0, draw(1))
    steps = sent.double() / Grid.of(1.0, 1000).step
    assert sent.dtype == torch.float32
    assert torch.equal(steps, steps.round())
    assert abs(float(sent.std()) / 20 - 1) < 0.1


def test_little_noise_is_raised_and_too_much_refused():
    assert abs(float(noise_of(1e-9, 100_000, draw(2)).std()) / 256 - 1) < 0.02
    with pytest.raises(ConfigurationError, match="lower noise_multiplier, or raise epsilon"):
        noise_of(2.0**53, 3, draw(2))


def fold(deltas, *, coins, clip_norm=0.7):
    mean = PrivateMean(5)
    mean.clip_norm, mean.coins = clip_norm, coins
    mean.open(torch.empty(3))
    for client, delta in deltas:
        mean.add(ClientUpdate(client, delta, torch.empty(0), 1, 1))
    return mean


def test_sums_in_steps_are_exact_in_any_order_and_over_processes():
    deltas = [(i, torch.randn(3, generator=torch.Generator().manual_seed(i))) for i in range(5)]
    whole, backwards = fold(deltas, coins=draw), fold(deltas[::-1], coins=draw)
    assert torch.equal(whole.total, backwards.total)
    parts = [fold(deltas[:2], coins=draw), fold(deltas[2:], coins=draw)]
    parts[0].load_sums([a + b for a, b in zip(parts[0].sums(), parts[1].sums(), strict=True)])
    assert torch.equal(parts[0].total, whole.total)
    plain = fold(deltas, coins=None)
    assert torch.allclose(whole.close(), plain.close(), atol=1e-7)
    again = PrivateMean(5)
    again.clip_norm, again.coins = 0.7, draw
    again.open(torch.empty(3))
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again.total, whole.total)
