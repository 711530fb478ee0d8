"""Rounded Gaussian noise: its distribution, and that every comparison is exact."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2, kstest, norm

from fl_lightning.kernels import gaussian_noise as module
from fl_lightning.kernels.gaussian_noise import first_pass, rounded_gaussian
from fl_lightning.privacy.noise.noise_source import SeededNoise


def draw(*ids):
    return SeededNoise(0).stream(*ids)


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
    strips, words = module._strips(stddev), SeededNoise(0).words(400_000, 5)
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
    """Return a draw that gives these words, one after the other."""
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
