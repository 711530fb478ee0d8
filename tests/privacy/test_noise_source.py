"""Random words: uniform, repeatable or never the same."""

import builtins

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fl_lightning.privacy.noise.noise_source import SecureNoise, SeededNoise, coins


@pytest.fixture(params=["cryptography", "the system's generator"])
def secure(request, monkeypatch):
    """Secure words with the package and without it."""
    if request.param == "cryptography":
        pytest.importorskip("cryptography")
        return SecureNoise()
    find = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    return SecureNoise()


def check_uniform(words):
    assert words.dtype == np.uint64
    assert kstest(words / 2.0**64, "uniform").pvalue > 1e-6
    bits = np.unpackbits(words.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5


def test_words_are_uniform(secure):
    check_uniform(SeededNoise(0).words(100_000, 3))
    check_uniform(secure.words(100_000, 3))


def test_seeded_words_depend_on_seed_ids_and_purpose_alone():
    assert np.array_equal(SeededNoise(0).words(5, 3), SeededNoise(0).words(5, 3))
    others = [SeededNoise(0).words(5, 4), SeededNoise(1).words(5, 3), coins(0).words(5, 3)]
    assert not any(np.array_equal(SeededNoise(0).words(5, 3), words) for words in others)
    draw = SeededNoise(0).stream(3)
    assert np.array_equal(np.concatenate([draw(2), draw(3)]), SeededNoise(0).words(5, 3))


def test_secure_words_never_repeat_and_leave_the_global_generators_alone(secure):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw = secure.stream(3)
    drawn = np.concatenate([secure.words(50, 3), secure.words(50, 3), draw(50), draw(50)])
    assert len(np.unique(drawn)) == 200
    assert torch.equal(torch.get_rng_state(), before)
    assert secure.words(0).shape == (0,)
