"""Who takes part, with what, how fast: cohorts, partitions, devices, attackers are pure functions.

They are true of what they say of themselves, and leave what they are given as it is.
"""

import math

import numpy as np
import pytest
import torch
from families import made, of, vector

from fl_lightning.core.update import ClientUpdate
from fl_lightning.data import NaturalPartition, Population
from fl_lightning.server.robust.matrix import UpdateRows

pytestmark = pytest.mark.usefixtures("global_generators_stay")


# Cohorts


def population(*, known):
    """Return twelve clients of whom one is away, and of some of whom something is known."""
    clients = Population(np.arange(5, 17), is_available=np.arange(12) != 7)
    if known:
        losses, durations = {3: 0.5, 5: 1.5, 8: 0.1}, {3: 2.0, 5: 1.0}
        clients.note([3, 5, 8], round_index=1, losses=losses, durations=durations)
    return clients


@of("cohort")
@pytest.mark.parametrize("known", [False, True])
def test_a_cohort_is_a_pure_function_that_returns_available_clients(cls, known):
    cohort, clients = made(cls), population(known=known)
    for index in range(8):
        ids = cohort.sample(index, clients, seed=3)
        assert ids.dtype == np.int64
        assert (np.diff(ids) > 0).all()
        assert set(ids) <= set(clients.available_ids)
        restored = Population(clients.num_examples, is_available=clients.is_available)
        restored.load_state_dict(clients.state_dict())
        np.testing.assert_array_equal(ids, made(cls).sample(index, restored, 3))
        assert set(cohort.candidates(index, clients, 3)) <= set(clients.available_ids)
    untouched = population(known=known).state_dict()
    torch.testing.assert_close(clients.state_dict(), untouched, rtol=0, atol=0, equal_nan=True)


@of("cohort")
def test_a_cohort_is_what_it_says_of_its_draw(cls):
    cohort, seen = made(cls), np.zeros(12)
    for index in range(40):
        ids, blind = (cohort.sample(index, population(known=k), seed=3) for k in (True, False))
        if cohort.is_fixed_in_advance:
            assert ids.tolist() == blind.tolist()
        if cohort.has_fixed_size:
            assert len(ids) == min(cohort.expected_size(12), 11)
        if not cohort.needs_fresh_losses:
            assert len(cohort.candidates(index, population(known=True), 3)) == 0
        seen[blind] += 1
    if cohort.is_uniform or cohort.coin is not None:  # five standard deviations
        np.testing.assert_allclose(np.delete(seen, 7), seen.sum() / 11, atol=5 * math.sqrt(40) / 2)
    if cohort.coin is not None:
        assert seen.sum() == pytest.approx(40 * 11 * cohort.coin, rel=0.15)


# Partitions


def labels_for(cls, labels):
    """Return labels, or for who divides by owners those of five clients."""
    return np.arange(len(labels)) % 5 if cls is NaturalPartition else labels


@of("partition")
def test_a_partition_is_a_pure_function_and_gives_every_example_once(cls):
    labels = labels_for(cls, np.arange(90) % 3)
    given = labels.copy()
    shards = made(cls).assign(given, num_clients=5, seed=2)
    np.testing.assert_array_equal(given, labels)
    assert len(shards) == 5
    assert sorted(np.concatenate(list(shards)).tolist()) == list(range(90))
    for shard, again in zip(shards, made(cls).assign(labels, 5, seed=2), strict=True):
        assert shard.dtype == torch.int64
        assert (shard.diff() > 0).all()
        np.testing.assert_array_equal(shard, again)


@of("partition")
def test_a_partition_looks_at_labels_only_if_it_says_so(cls):
    rule, labels = made(cls), labels_for(cls, np.arange(90) % 3)
    one, other = (rule.assign(some, 5, seed=2) for some in (labels, np.sort(labels)))
    differ = not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert differ == (
        getattr(rule, "uses_labels", True) or getattr(rule, "owners", None) is not None
    )


# Devices and attackers


@of("availability")
def test_availability_is_a_pure_function(cls):
    for index in range(6):
        there = made(cls).available(index, 30, seed=1)
        assert there.shape == (30,)
        assert there.dtype == np.bool_
        np.testing.assert_array_equal(there, made(cls).available(index, 30, seed=1))


@of("speeds")
def test_speeds_are_a_pure_function(cls):
    seconds = made(cls).seconds_per_step(6, seed=1)
    assert seconds.shape == (6,)
    assert (seconds > 0).all()
    np.testing.assert_array_equal(seconds, made(cls).seconds_per_step(6, seed=1))


@of("forgery")
def test_a_forgery_is_a_pure_function_of_the_round(cls):
    rows = UpdateRows(torch.empty(6))
    for client in range(7):
        rows.append(ClientUpdate(client, vector(6, seed=client), torch.empty(0), 10, 1))

    def forged():
        attacks = made(cls).forge(rows, [1, 4], lambda client: np.random.default_rng(client))
        return [sent.copy() for sent in attacks]

    one, again = forged(), forged()
    assert len(one) == 2
    for sent, same in zip(one, again, strict=True):
        assert sent.shape == (6,)
        assert sent.dtype == rows.dtype
        np.testing.assert_array_equal(sent, same)


@of("poison")
def test_a_poison_leaves_what_it_is_given(cls):
    images, labels = vector(72).view(2, 1, 6, 6), torch.tensor([0, 2])
    poison = made(cls)
    changed, wrong = poison.change(images, labels)
    assert changed.shape == images.shape
    assert wrong.shape == labels.shape
    assert wrong.tolist() != [0, 2]
    assert torch.equal(images, vector(72).view(2, 1, 6, 6))
    assert labels.tolist() == [0, 2]
    assert 0 <= poison.share <= 1
