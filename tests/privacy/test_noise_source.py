"""Where noise comes from: its source, the grid it lies on, its rounding."""

import builtins
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest, norm

from fl_lightning import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.kernels import gaussian_noise as module
from fl_lightning.kernels.gaussian_noise import first_pass, rounded_gaussian
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noise_of, noisy
from fl_lightning.privacy.noise.noise_source import NoiseSource, coins
from fl_lightning.privacy.private_mean import PrivateMean


@pytest.fixture(params=["cryptography", "the system's generator"])
def secure(request, monkeypatch):
    """Secure words with the package and without it."""
    if request.param == "cryptography":
        pytest.importorskip("cryptography")
        return NoiseSource()
    find = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    return NoiseSource()


def check_uniform(words):
    assert words.dtype == np.uint64
    assert kstest(words / 2.0**64, "uniform").pvalue > 1e-6
    bits = np.unpackbits(words.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5


def test_words_are_uniform(secure):
    check_uniform(NoiseSource(0).stream(3)(100_000))
    check_uniform(secure.stream(3)(100_000))


def test_seeded_words_depend_on_seed_ids_and_purpose_alone():
    assert np.array_equal(NoiseSource(0).stream(3)(5), NoiseSource(0).stream(3)(5))
    others = [NoiseSource(0).stream(4)(5), NoiseSource(1).stream(3)(5), coins(0).stream(3)(5)]
    assert not any(np.array_equal(NoiseSource(0).stream(3)(5), words) for words in others)
    draw = NoiseSource(0).stream(3)
    assert np.array_equal(np.concatenate([draw(2), draw(3)]), NoiseSource(0).stream(3)(5))


def test_secure_words_never_repeat_and_leave_the_global_generators_alone(secure):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw = secure.stream(3)
    drawn = np.concatenate([secure.stream(3)(50), secure.stream(3)(50), draw(50), draw(50)])
    assert len(np.unique(drawn)) == 200
    assert torch.equal(torch.get_rng_state(), before)
    assert secure.stream()(0).shape == (0,)


norms = st.floats(1e-6, 1e6)


def draw(*ids):
    return NoiseSource(0).stream(*ids)


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


@pytest.mark.parametrize("stddev", [256.0, 1000.1, 2.0**20, 3e9, 2.0**52])
def test_numbers_are_rounded_normal_ones(stddev):
    count = 200_000
    numbers = rounded_gaussian(stddev, count, draw(1))
    spread = numbers + np.random.default_rng(0).random(count) - 0.5  # within a step: nearly normal
    assert kstest(spread / stddev, "norm").pvalue > 1e-4
    assert abs(numbers.mean()) < 5 * stddev / math.sqrt(count)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / math.sqrt(count)


def test_each_whole_number_has_the_chance_of_its_interval():
    """A chi-squared test over single numbers, with the interval's exact chance."""
    stddev, count = 256.0, 2_000_000
    numbers = rounded_gaussian(stddev, count, draw(2))
    whole = np.arange(-400, 401)
    expected = count * (norm.cdf((whole + 0.5) / stddev) - norm.cdf((whole - 0.5) / stddev))
    found = np.bincount(numbers[np.abs(numbers) <= 400] + 400, minlength=801)
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, 800) > 1e-5


def test_it_is_a_function_of_the_words_alone_in_parts_of_any_size(monkeypatch):
    whole = rounded_gaussian(1e5, 5000, draw(3))
    assert np.array_equal(whole, rounded_gaussian(1e5, 5000, draw(3)))
    assert not np.array_equal(whole, rounded_gaussian(1e5, 5000, draw(4)))
    monkeypatch.setattr(module, "_CHUNK", 700)
    assert kstest(rounded_gaussian(1e5, 5000, draw(3)) / 1e5, "norm").pvalue > 1e-4


@pytest.mark.parametrize("stddev", [256.0, 12345.678, 2.0**50])
def test_the_file_of_c_does_the_same_to_the_bit(stddev):
    strips, words = module._strips(stddev), NoiseSource(0).stream(5)(400_000)
    words[:3] = [
        0,
        2**64 - 1,
        int(strips.ends[5]) << 1,
    ]  # the first and the last strip, and an open one
    words[3] = (int(strips.ends[7]) << 1) - 1
    choices, places = words[:200_000], words[200_000:]
    here, there = np.empty(200_000, np.int64), np.empty(200_000, np.int64)
    which, is_open = module._first_pass(here, strips, choices, places)
    also, also_open = first_pass(there, strips, choices, places)
    assert np.array_equal(which, also)
    assert np.array_equal(is_open, also_open)
    assert is_open.sum() >= 2
    settled = np.setdiff1d(np.arange(200_000), which)
    assert np.array_equal(here[settled], there[settled])


def test_strips_have_their_chances():
    strips = module._strips(1000.1)
    masses = np.exp(-((np.arange(2000) * float(strips.width)) ** 2) / 2)
    ends = np.cumsum(masses) / masses.sum()
    assert np.allclose(strips.ends / 2.0**63, ends[: len(strips.ends)], atol=1e-14)


def fixed(*words):
    """Return a function that gives these words, one after the other."""
    left = list(words)
    return lambda count: np.array([left.pop(0) for _ in range(count)], np.uint64)


@pytest.mark.parametrize(("further", "strip"), [(0, 5), (2**64 - 1, 6)])
def test_a_choice_on_the_border_of_two_strips_is_made_by_further_bits(further, strip):
    strips = module._strips(1000.1)
    assert strips.strip_of(int(strips.ends[5]), fixed(further)) == strip


def test_beyond_the_table_strips_go_on():
    strips = module._strips(1000.1)
    first_full = int(np.searchsorted(strips.ends, np.uint64(2**63 - 1)))
    assert strips.strip_of(2**63 - 1, fixed(0, 5)) >= first_full
    assert strips.strip_of(2**63 - 1, fixed(2**64 - 2, 5, 5)) > first_full


@pytest.mark.parametrize("bits", [80, 208])
def test_acceptance_on_the_border_is_decided_by_further_bits(bits):
    """A coin's first bits equal those of the chance: only what comes after them decides."""
    strips, strip, place = module._strips(1000.1), 40, 3 << 40
    share = Fraction(2 * place + 1, 2**49)
    chance = strips._chance(strip, share)
    first = int(chance * Decimal(2) ** 80)
    below, above = fixed(2**63, 0, 2**63, 0), fixed(2**63, 2**64 - 1, 2**63, 2**64 - 1)
    assert strips.is_accepted(strip, place, first, below)
    assert not strips.is_accepted(strip, place, first, above)


@pytest.mark.parametrize("stddev", [0.0, 255.9, 2.0**53, math.nan, math.inf])
def test_other_standard_deviations_are_refused(stddev):
    with pytest.raises(ValueError, match="standard deviation must be in"):
        rounded_gaussian(stddev, 3, draw(0))
