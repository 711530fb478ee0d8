"""Means of hidden updates: exactly those of the quantised ones, or of the ones that were encrypted."""

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError, Mean, RoundFailure
from fl_lightning.core.seeds import derive_seed, numpy_generator
from fl_lightning.core.update import ClientUpdate
from fl_lightning.secure import EncryptedMean, Paillier, SecureMean
from fl_lightning.secure.protocol.session import SparseGraph
from fl_lightning.secure.sum_quantiser import SumQuantiser
from fl_lightning.server.protected import Terms
from fl_lightning.updates import RandomK
from fl_lightning.updates.payload import Dense

SEED, ROUND, SIZE = 5, 3, 50


def some_updates(num_clients=6, size=SIZE):
    generator = torch.Generator().manual_seed(1)
    deltas = 0.3 * torch.randn(num_clients, size, generator=generator)
    return [
        ClientUpdate(10 * client, delta, torch.empty(0), 3 + 7 * client, 1)
        for client, delta in enumerate(deltas)
    ]


def began(aggregator, updates, num_clients=6, missing=()):
    aggregator.begin(Terms(most_clients=num_clients, seed=SEED))
    aggregator.start_round(ROUND)
    aggregator.open(torch.empty(len(updates[0].delta)))
    for update in updates:
        aggregator.add(update)
    aggregator.miss(missing)
    return aggregator


def plain_mean(updates):
    mean = Mean()
    mean.open(updates[0].delta)
    for update in updates:
        mean.add(update)
    return mean.close()


def quantised_mean(updates, max_examples, levels=256):
    """Σ w q / Σ w in Python's own integers."""
    quantiser = SumQuantiser(num_clients=6, clip=1.0, levels=levels, max_examples=max_examples)
    totals, counted = [0] * len(updates[0].delta), 0
    for update in updates:
        draw = numpy_generator(SEED, "secure rounding", ROUND, update.client_id).random
        w = min(update.num_examples, max_examples)
        levels_of = quantiser.levels_of(update.delta, draw).tolist()
        totals, counted = [t + w * q for t, q in zip(totals, levels_of, strict=True)], counted + w
    return torch.tensor([t * 2 / levels / counted - 1 for t in totals]), counted


@pytest.mark.parametrize(("protocol", "max_examples"), [("run", 20), ("count", 1), ("run", 1000)])
def test_the_secure_mean_is_that_of_the_quantised_updates(protocol, max_examples):
    updates = some_updates()
    options = {"levels": 256, "max_examples": max_examples, "protocol": protocol}
    mean = began(SecureMean(**options), updates).close()
    expected, _ = quantised_mean(updates, max_examples)
    assert torch.allclose(mean, expected, rtol=0, atol=1e-6)
    if max_examples == 1000:
        assert (mean - plain_mean(updates)).abs().max() < 2 / 256  # one step
        assert not torch.allclose(mean, plain_mean(updates), atol=1e-6)


@pytest.mark.parametrize("clip", [0.5, 8.0])
def test_by_default_the_mean_is_the_plain_one_to_1e_6(clip):
    updates = some_updates(size=5000)
    exact = torch.stack([u.num_examples * u.delta.double().clamp(-clip, clip) for u in updates])
    exact = exact.sum(0) / sum(update.num_examples for update in updates)
    secure = began(SecureMean(clip=clip), updates)
    assert (secure.close().double() - exact).abs().max() < 1e-6
    assert "within" not in secure.hides


def test_where_the_ring_is_too_small_for_that_it_is_said():
    updates = some_updates()
    secure = began(SecureMean(clip=2.0, bits=32), updates)
    error = (secure.close() - plain_mean(updates)).abs().max()
    assert 1e-6 < error < 8e-6
    assert "within 8e-06 of the plain one, not 1e-06: 32 bits hold 524288 levels" in secure.hides


def test_large_vectors_are_safe_from_an_active_server_by_default():
    secure_sum = SecureMean().secure_sum(32)
    assert not secure_sum.session(6, size=1000).active
    assert secure_sum.session(6, size=2_000_000).active
    for options in ({"active": False}, {"threshold": 0.5}, {"sparse": SparseGraph()}):
        assert not SecureMean(**options).secure_sum(32).session(6, size=2_000_000).active
    assert SecureMean(active=True).secure_sum(32).session(6, size=1).active


def test_every_run_of_a_seed_is_another_protocol_run_with_the_same_mean():
    runs = []
    for _ in range(2):
        secure = began(SecureMean(), some_updates())
        runs.append((secure.close(), secure.secure_sum(32).session(6, size=1).identity))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] != runs[1][1]


@pytest.mark.parametrize("options", [{"active": True}, {"sparse": SparseGraph()}], ids=str)
def test_counting_gives_the_bits_and_bytes_of_running(options):
    updates = some_updates(num_clients=12, size=8)
    settings = {"num_clients": 14, "missing": [1, 2]}
    run = began(SecureMean(**options), updates, **settings)
    count = began(SecureMean(protocol="count", **options), updates, **settings)
    assert torch.equal(run.close(), count.close())
    assert run.protection_cost.bytes_up == count.protection_cost.bytes_up
    assert run.protection_cost.bytes_down == count.protection_cost.bytes_down
    assert set(run.protection_cost.bytes_up) == {1, 2} | {update.client_id for update in updates}
    assert set(run.protection_cost.seconds) == {"client_seconds", "server_seconds"}
    assert count.protection_cost.seconds == {}


def test_random_coordinates_are_the_same_for_all_and_the_only_ones_that_travel():
    updates, random_k = some_updates(), RandomK(0.2)
    secure = began(SecureMean(clip=4.0, levels=2**32, random_k=random_k), updates)
    expected = plain_mean(updates)
    seed = derive_seed(SEED, "secure coordinates", ROUND)
    kept = random_k.on_client(Dense(expected), seed)
    expected = random_k.on_server(kept, seed, SIZE).to_dense()
    assert torch.allclose(secure.close(), expected, rtol=0, atol=1e-5)
    assert int(expected.count_nonzero()) == 10
    whole = SecureMean(clip=4.0, levels=2**32)
    whole.begin(Terms(most_clients=6, seed=SEED))
    bits = (6 * 2**32 * 1024).bit_length()
    up, down = secure.typical_bytes(SIZE, 6)
    assert whole.typical_bytes(SIZE, 6) == (up + 40 * bits // 8, down)
    assert set(secure.protection_cost.bytes_up.values()) == {up}


@pytest.mark.parametrize("protocol", ["run", "count"])
def test_too_few_clients_leave_no_sum(protocol):
    with pytest.raises(RoundFailure, match=r"round 4: the secure sum of 3 updates, with 3 clients"):
        began(SecureMean(protocol=protocol), some_updates()[:3], missing=[1, 2, 3]).close()
    with pytest.raises(RoundFailure, match="num_clients"):
        began(SecureMean(protocol=protocol), some_updates()[:1]).close()


@pytest.mark.parametrize(
    ("options", "clients", "message"),
    [
        ({"bits": 30}, 100, r"overflow.*bits of at least 33"),
        ({"levels": 2**48, "max_examples": 2**20}, 3, "fewer levels or smaller max_examples"),
        ({"threshold": 0.4}, 10, "threshold must be from 0.5"),
        ({"active": True, "threshold": 0.6}, 10, "threshold must be from 0.667"),
        ({"clip": 0.0}, 10, "clip must be a positive number"),
        ({}, 1, "num_clients must be from 2"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_the_first_round(options, clients, message):
    with pytest.raises(ConfigurationError, match=f"(?s)SecureMean: .*{message}"):
        SecureMean(**options).begin(Terms(most_clients=clients))


class TestEncryptedMean:
    @pytest.fixture(autouse=True)
    def tenseal(self):
        pytest.importorskip("tenseal")
        pytest.importorskip("phe")

    @pytest.mark.parametrize("max_examples", [1, 1024])
    def test_it_is_the_mean(self, max_examples):
        updates = some_updates(size=5000)
        expected = plain_mean(updates)
        if max_examples == 1:
            expected = torch.stack([update.delta for update in updates]).mean(0)
        encrypted = began(EncryptedMean(max_examples=max_examples), updates, num_clients=20)
        assert torch.allclose(encrypted.close(), expected, rtol=0, atol=1e-4)
        up, _ = encrypted.typical_bytes(5000, 6)
        assert np.mean(list(encrypted.protection_cost.bytes_up.values())) == pytest.approx(
            up, rel=0.02
        )

    @pytest.mark.parametrize("paillier", [None, {"key_bits": 2048, "clip": 4.0}])
    def test_after_the_first_round_only_what_moved_most_is_encrypted(self, paillier):
        updates = some_updates()
        scheme = None if paillier is None else Paillier(**paillier)
        most = 1e-4 if paillier is None else 1e-6
        encrypted = began(EncryptedMean(fraction=0.1, paillier=scheme), updates)
        first = encrypted.close()
        assert torch.allclose(first, plain_mean(updates), rtol=0, atol=most)
        encrypted.start_round(ROUND + 1)
        encrypted.open(first)
        for update in updates:
            encrypted.add(update)
        total = encrypted._total
        largest = set(first.abs().topk(5).indices.tolist())
        in_clear = torch.tensor([i for i in range(SIZE) if i not in largest])
        assert total.clear.shape == (45,)
        assert torch.allclose(encrypted.close(), plain_mean(updates), rtol=0, atol=most)
        up, _ = encrypted.typical_bytes(SIZE, 6)
        assert np.mean(list(encrypted.protection_cost.bytes_up.values())) == pytest.approx(
            up, rel=0.2
        )
        share = sum(update.num_examples for update in updates) / (6 * 1024)
        assert torch.allclose(total.clear / share, plain_mean(updates)[in_clear], atol=1e-5)

    def test_a_mean_of_one_update_is_not_decrypted(self):
        with pytest.raises(
            RoundFailure, match="round 4: 1 client sent an update, and EncryptedMean needs 2"
        ):
            began(EncryptedMean(), some_updates()[:1]).close()
        began(EncryptedMean(), some_updates()[:2]).close()

    def test_refusals(self):
        with pytest.raises(ConfigurationError, match=r"fraction must be in \(0, 1\], got 0"):
            EncryptedMean(fraction=0.0)
        with pytest.raises(ConfigurationError, match="degree must be one of"):
            EncryptedMean(degree=1000)
        with pytest.raises(ConfigurationError, match=r"trainer.devices to 1"):
            EncryptedMean().begin(Terms(most_clients=3, num_processes=2))
        huge = ClientUpdate(7, torch.tensor([1e9]), torch.empty(0), 1, 1)
        with pytest.raises(RoundFailure, match="client 7's update: numbers must be"):
            began(EncryptedMean(), [huge])


class TestPaillier:
    @pytest.fixture(autouse=True)
    def phe(self):
        pytest.importorskip("phe")

    @pytest.mark.parametrize("max_examples", [1, 1024])
    def test_it_is_the_mean_within_1e_6_in_every_run(self, max_examples):
        updates = some_updates()
        expected = plain_mean(updates)
        if max_examples == 1:
            expected = torch.stack([update.delta for update in updates]).mean(0)
        # numbers within ±3
        scheme = Paillier(key_bits=2048, clip=4.0)
        options = {"max_examples": max_examples, "paillier": scheme}
        one, two = (began(EncryptedMean(**options), updates).close() for _ in range(2))
        assert (one - expected).abs().max() < 1e-6
        assert torch.equal(one, two)

    def test_a_vector_that_takes_too_long_is_refused_with_the_time(self):
        encrypted = EncryptedMean(paillier=Paillier(key_bits=2048))
        encrypted.begin(Terms(most_clients=3))
        with pytest.raises(
            ConfigurationError, match=r"Paillier: .* about \d+ s .*max_seconds 60: enc"
        ):
            encrypted.typical_bytes(10_000_000, 3)
        with pytest.raises(ConfigurationError, match="takes about"):
            encrypted.open(torch.empty(10_000_000))

    def test_refusals(self):
        for option, value in (("key_bits", 1024), ("clip", 0.0), ("max_seconds", -1.0)):
            with pytest.raises(ConfigurationError, match=f"Paillier: {option} must be"):
                Paillier(**{option: value})
        with pytest.raises(ConfigurationError, match="degree 16384 is an option of CKKS"):
            EncryptedMean(degree=16384, paillier=Paillier())
