"""Members that are functions: pure, true of what they say of themselves, unchanged by a checkpoint.

They leave what they are given as it is, and no global generator draws for them.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import made, of, through_a_file, vector
from torch import nn
from toys import toy

from fl_lightning import AllClients, ConfigurationError
from fl_lightning.client import Outcome
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data import NaturalPartition, Population, RoundRobinCohort
from fl_lightning.privacy.mechanism import AccountedRun, LocalSampling, Privacy
from fl_lightning.privacy.noise.grid import Grid
from fl_lightning.privacy.noise.noise_source import NoiseSource
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


# Corrections and personalisations


@of("correction")
def test_a_correction_is_functions_of_vectors(cls):
    rule, memory, mean = made(cls), vector(seed=1), vector(seed=2)
    for given in ((None, None), (memory, None), (memory, mean), (None, mean)):
        one, again = rule.shift(*given), made(cls).shift(*given)
        assert made(cls).pull == rule.pull >= 0
        assert rule.has_shift or one is None
        if one is not None:
            assert torch.equal(one, again)
        if rule.remembers:
            outcome = Outcome(vector(seed=3), vector(seed=4), lambda: 0.5, lambda: vector(seed=5))
            new = rule.remember(*given, outcome)
            assert new.shape == memory.shape
            assert torch.equal(new, made(cls).remember(*given, outcome))
            owners = (memory, mean, outcome.start, outcome.delta)
            assert new.data_ptr() not in [owner.data_ptr() for owner in owners]
            assert torch.equal(outcome.start, vector(seed=3))
            assert torch.equal(outcome.delta, vector(seed=4))
    assert torch.equal(memory, vector(seed=1))
    assert torch.equal(mean, vector(seed=2))


@of("correction")
def test_a_correction_without_a_mean_leaves_the_aggregate_alone(cls):
    rule, aggregate = made(cls), vector(seed=1)
    assert torch.equal(rule.pseudo_gradient(aggregate, None), vector(seed=1))
    changed = not torch.equal(rule.pseudo_gradient(aggregate, vector(seed=2)), vector(seed=1))
    assert rule.needs_mean or not (changed or rule.reads_mean)
    assert torch.equal(aggregate, vector(seed=1))


@of("personalisation")
def test_a_personalisation_names_what_there_is(cls):
    rule, module = made(cls), toy(batch_norm=True)
    names = rule.names(module)
    assert names == made(cls).names(toy(batch_norm=True))
    parameters = {name for name, _ in module.named_parameters()}
    everything = parameters | {name for name, _ in module.named_buffers()}
    assert len(set(names)) == len(names)
    assert set(names) <= everything
    if rule.beside:  # a copy of all
        assert set(names) == everything
    else:
        assert rule.pull == 0
        assert rule.mixture is None
    assert rule.mixture is None or 0 <= rule.mixture <= 1
    assert not (rule.tuning_steps and names)


# Privacies


def run_of(num_rounds=6):
    local = LocalSampling(np.full(12, 20), 5, np.full(12, 2))
    return AccountedRun(
        RoundRobinCohort(size=4), 12, num_rounds, seed=0, num_coordinates=8, local=local
    )


def mechanism_of(privacy, num_rounds=6):
    run = run_of(num_rounds)
    try:
        privacy.check_cohort(run.cohort)
    except ConfigurationError:  # it counts on chance
        run = replace(run, cohort=AllClients())
    return privacy.mechanism(run, NoiseSource(0))


@of("privacy")
def test_the_budget_is_kept_and_grows_with_the_rounds(cls):
    spent = [mechanism_of(made(cls)).epsilon(rounds) for rounds in (1, 3, 6)]
    assert spent[0] > 0
    assert spent == sorted(spent)
    assert spent[0] < spent[-1] < math.inf
    found = mechanism_of(made(cls, noise_multiplier=None, epsilon=4.0))
    assert 3.9 < found.epsilon(6) <= 4.0
    assert mechanism_of(made(cls, noise_multiplier=0.0)).epsilon(6) == math.inf


@of("privacy")
def test_the_noise_goes_on_from_a_checkpoint(cls):
    privacy = made(cls)
    if not isinstance(privacy, Privacy):  # its noise is in the clients' steps
        assert mechanism_of(privacy).state_dict() == {}
        return
    one, other = mechanism_of(privacy), mechanism_of(privacy)
    grid = Grid.of(1.0, 8)

    def release(mechanism, index):
        noise = mechanism.server_noise(grid, 8, NoiseSource(1).stream(index))
        total = torch.arange(8) * (index + 1)
        released = mechanism.released(total, torch.from_numpy(noise))
        mechanism.commit()
        return released

    for index in range(3):
        release(one, index)
    other.load_state_dict(through_a_file(one.state_dict()))
    for index in range(3, 6):
        assert torch.equal(release(one, index), release(other, index))


# Optimizers


@of("optimizer")
def test_an_optimizer_goes_on_from_its_state(cls):
    def step(optimizer, index):
        [param] = optimizer.param_groups[0]["params"]
        param.grad = vector(len(param), seed=index)
        optimizer.step()
        return param

    one, other = made(cls), made(cls)
    for index in range(3):
        moved = step(one, index)
    with torch.no_grad():
        other.param_groups[0]["params"][0].copy_(moved)
    other.load_state_dict(through_a_file(one.state_dict()))
    for index in range(3, 6):
        assert torch.equal(step(one, index), step(other, index))


# Staleness


@of("staleness")
def test_weights_fall_with_staleness(cls):
    weights = [made(cls).weight(tau) for tau in range(12)]
    assert weights[0] == 1
    assert weights == sorted(weights, reverse=True)
    assert 0 < weights[-1] < 1


@of("asynchrony")
def test_stale_updates_count_less_alone_as_in_a_group(cls):
    rule, deltas, drift = made(cls), vector(12).view(3, 4), vector(4, seed=1)
    assert 1 <= rule.buffer_size <= rule.concurrency
    rows = rule.weighed(deltas, staleness=2, drift=drift)
    for row, delta in zip(rows, deltas, strict=True):
        assert torch.equal(row, rule.weighed(delta, staleness=2, drift=drift))
    fresh, stale, staler = (
        float(rule.weighed(deltas, staleness=tau, drift=None).norm()) for tau in (0, 2, 9)
    )
    assert fresh > stale > staler > 0
    assert torch.equal(deltas, vector(12).view(3, 4))


# Scores of entries, and heads


def batches():
    random = torch.Generator().manual_seed(6)
    for _ in range(3):
        yield torch.randn(5, 4, generator=random), torch.arange(5) % 3


def network():
    return toy(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


@of("sensitivity")
def test_a_sensitivity_adds_up_over_examples_and_leaves_the_model_alone(cls):
    model, before = network(), network().state_dict()
    whole, again, other = (made(cls)(model, batches(), seed=seed) for seed in (0, 0, 1))
    names = [name for name, _ in model.named_parameters()]
    assert list(whole.sums) == names
    assert whole.num_examples == 15
    for name, total in whole.sums.items():
        assert bool((total >= 0).all())
        assert torch.equal(total, again.sums[name])
    draws_nothing = all(torch.equal(whole.sums[name], other.sums[name]) for name in names)
    if draws_nothing:
        first, *others = ([batch] for batch in batches())
        parts = made(cls)(model, first)
        for batch in others:
            parts = parts + made(cls)(model, batch)
        torch.testing.assert_close(dict(parts.sums), dict(whole.sums))
        assert parts.num_examples == 15
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@of("order of entries")
def test_an_order_of_entries_is_a_pure_function(cls):
    rule = made(cls)
    parameters = {"weight": vector(6).view(2, 3), "bias": vector(3, seed=1)}
    scores = {name: value.abs() + 1 for name, value in parameters.items()}
    one = rule.order_by(parameters, scores, seed=4)
    again = made(cls).order_by(parameters, scores if rule.needs_scores else {}, seed=4)
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in parameters.items()
    }
    assert all(torch.equal(one[name], again[name]) for name in parameters)
    assert torch.equal(parameters["weight"], vector(6).view(2, 3))


@of("fit of a head")
def test_a_head_does_not_depend_on_whose_examples_are_whose(cls):
    features, labels = vector(80).view(20, 4), torch.arange(20) % 3
    alone = made(cls).fit([(features, labels)], 4, 3)
    owners = [(features[rows], labels[rows]) for rows in (slice(0, 3), slice(3, 15), slice(15, 20))]
    shared = made(cls).fit(owners, 4, 3)
    torch.testing.assert_close(shared.weight, alone.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shared.bias, alone.bias, rtol=1e-5, atol=1e-6)
