"""Noise: the right distribution, repeatable or never the same."""

import pytest
import torch
from scipy.stats import kstest

from fl_lightning.server.privacy import noise_source
from fl_lightning.server.privacy.noise_source import SecureNoise, SeededNoise


@pytest.mark.parametrize("source", [SeededNoise(0), SecureNoise()])
def test_numbers_are_standard_normal(source):
    numbers = source.normal(200_000, 3)
    assert kstest(numbers.numpy(), "norm").pvalue > 1e-6
    assert abs(float(numbers.mean())) < 5 / 200_000**0.5
    assert abs(float(numbers.var()) - 1) < 5 * (2 / 200_000) ** 0.5
    neighbours = float((numbers[1:] * numbers[:-1]).mean())
    assert abs(neighbours) < 5 / 200_000**0.5


def test_seeded_noise_depends_on_seed_and_round_alone():
    assert torch.equal(SeededNoise(0).normal(5, 3), SeededNoise(0).normal(5, 3))
    assert not torch.equal(SeededNoise(0).normal(5, 3), SeededNoise(0).normal(5, 4))
    assert not torch.equal(SeededNoise(0).normal(5, 3), SeededNoise(1).normal(5, 3))


def test_secure_noise_never_repeats_and_leaves_the_global_generators_alone(monkeypatch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert not torch.equal(SecureNoise().normal(5, 3), SecureNoise().normal(5, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert SecureNoise().normal(0).shape == (0,)
    monkeypatch.setattr(noise_source, "CHUNK", 7)  # every number of every chunk is drawn
    assert SecureNoise().normal(17).unique().numel() == 17
