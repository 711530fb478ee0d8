"""Whole numbers with noise in a secure sum: exactly their sum, and never one that wraps round."""

from itertools import chain, repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import AllClients, ConfigurationError, DistributedDP, RoundFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, composed_epsilon
from fl_lightning.privacy.distributed import largest_noise, skellam_noise
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.secure import SecureMean
from fl_lightning.secure.protocol.session import SparseGraph
from fl_lightning.secure.ring import Ring
from fl_lightning.secure.secure_mean import SecurePrivateSum, from_ring, to_ring
from fl_lightning.server.protected import Terms

SIZE, CLIP, ROUND = 200, 0.5, 3


def mechanism(secure, num_clients=6, rounds=4, **options):
    terms = Terms(most_clients=num_clients, seed=5)
    secure.begin(terms)
    fewest = secure.fewest_survivors(num_clients)
    run = AccountedRun(AllClients(), num_clients, rounds, 5, SIZE, fewest_survivors=fewest)
    setting = DistributedDP(**{"clip_norm": CLIP, "noise_multiplier": 2.0, **options})
    return setting.mechanism(run, NoiseSource(0))


def deltas(num_clients=6):
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(num_clients, SIZE, generator=generator)


def closed(secure, made, clients, missing=()):
    total = secure.with_noise_shares(lambda: made)
    total.start_round(ROUND)
    total.open(torch.empty(SIZE))
    total.clip_norm = CLIP
    for client in clients:
        delta = deltas()[client]
        total.add(ClientUpdate(client, delta, torch.empty(0), 7 + client, 1))
    total.miss(missing)
    return total.close(), total


@pytest.mark.parametrize(
    "options", [{"protocol": "count"}, {"active": True}, {"sparse": SparseGraph()}], ids=str
)
def test_what_is_released_is_the_sum_of_what_clients_sent(options):
    secure = SecureMean(**options)
    made = mechanism(secure)
    mean, total = closed(secure, made, range(5), missing=[5])
    whole = sum(
        made.client_integers(d * min(1.0, CLIP / float(d.norm())), CLIP, ROUND, client)
        for client, d in enumerate(deltas()[:5])
    )
    assert torch.equal(mean, made.decoded(whole, CLIP, mean) / 6)
    assert (total.num_replies, total.num_unclipped) == (5, 0)
    assert total.protection_cost.bytes_up[5] < total.protection_cost.bytes_up[0]


def test_noise_is_for_the_fewest_vectors_that_a_sum_can_have():
    """Of six clients five must answer: their five shares are what is accounted, six are more."""
    made = mechanism(SecureMean())
    assert made.fewest_replies == 5
    assert made.share_variance * 5 == pytest.approx((2.0 * made.radius) ** 2)
    one, l2 = made.share_variance, 2 * made.radius
    assert made.epsilon(4) >= composed_epsilon({ReleaseCost(l2, 5 * one, SIZE): 4}, 1e-5)
    assert made.epsilon(4) > composed_epsilon({ReleaseCost(1.02 * l2, 6 * one, SIZE): 4}, 1e-5)
    # one share more than it takes: one client may tell its noise
    wary = mechanism(SecureMean(), min_shares=4)
    assert wary.share_variance / wary.radius**2 == pytest.approx(2.0**2 / 4)


def test_the_noise_in_the_sum_has_its_variance():
    secure = SecureMean()
    made = mechanism(secure)
    mean, _ = closed(secure, made, range(5), missing=[5])
    plain = sum(d * min(1.0, CLIP / float(d.norm())) for d in deltas()[:5]) / 6
    expected = 2.0 * CLIP / 6
    assert float((mean - plain).std()) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("protocol", ["run", "count"])
def test_below_the_noise_that_is_accounted_there_is_no_sum(protocol):
    """The threshold alone would let four of six through; the shares need five."""
    secure = SecureMean(threshold=0.5, protocol=protocol)
    made = mechanism(secure, min_shares=5)
    closed(secure, made, range(5), missing=[5])
    with pytest.raises(RoundFailure, match="gave nothing"):
        closed(secure, made, range(4), missing=[4, 5])


@pytest.mark.parametrize(("clients", "noise"), [(2, 0.3), (9, 2.0), (1000, 7.0)])
def test_no_sum_can_wrap_round(clients, noise):
    # words of the largest noise, then of coins that round towards 0, so that the vector is short enough
    words = chain([1, 1], repeat(2**64 - 1))
    lowest = SimpleNamespace(
        stream=lambda *ids: lambda count: np.full(count, next(words), np.uint64)
    )
    rule = DistributedDP(clip_norm=1.0, noise_multiplier=noise, delta=1e-5)
    made = rule.mechanism(AccountedRun(AllClients(), clients, 1, seed=0), lowest)
    bits = made.num_bits(clients)
    limit = largest_noise(made.share_variance)
    extremes = [
        skellam_noise(made.share_variance, 1, lambda count, word=word: np.full(count, word))[0]
        for word in np.array([0, 1, 2**64 - 1, 2**64 - 2], np.uint64)
    ]
    assert np.abs(extremes).max() == limit
    largest = int(np.abs(made.client_integers(torch.tensor([-1.0]), 1.0, 0, 0)).max())
    assert largest > limit
    assert clients * largest < 2 ** (bits - 1) <= 2 * clients * (largest + 2)


@given(bits=st.integers(1, 64), numbers=st.lists(st.integers(-(2**62), 2**62), min_size=1))
def test_into_the_ring_and_back(bits, numbers):
    half = 2 ** (bits - 1)
    within = np.array([(n + half) % (2 * half) - half for n in numbers], np.int64)
    ring = Ring(bits)
    assert from_ring(to_ring(within, ring), ring).tolist() == within.tolist()


def test_refusals():
    secure = SecureMean()
    made = mechanism(secure)
    narrow = SecureMean()
    narrow.begin(Terms(most_clients=6))
    narrow.bits = 8
    with pytest.raises(ConfigurationError, match=r"need 1\d bits, and bits are 8"):
        SecurePrivateSum(lambda: made, narrow)
    coarse = SecureMean(levels=256)
    coarse.begin(Terms(most_clients=6))
    with pytest.raises(ConfigurationError, match="leave clip, levels, max_examples"):
        coarse.with_noise_shares(lambda: made)
    many = mechanism(secure, min_shares=7)
    with pytest.raises(ConfigurationError, match="min_survivors must be"):
        secure.with_noise_shares(lambda: many)
