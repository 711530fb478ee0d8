"""What becomes of vectors: transforms, corrections, personal models, noise, optimizers, staleness.

They are pure functions, or go on from a checkpoint, and leave what they are given as it is.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import made, of, through_a_file, vector
from toys import ToyModule

from fl_lightning import AllClients, ConfigurationError
from fl_lightning.client import Outcome
from fl_lightning.data import RoundRobinCohort
from fl_lightning.privacy.mechanism import AccountedRun, LocalSampling, Privacy
from fl_lightning.privacy.noise.grid import Grid
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.updates import Chain, Dense, ErrorFeedback
from fl_lightning.updates.transform import with_memory

pytestmark = pytest.mark.usefixtures("global_generators_stay")


# Transforms


SHAPES = ((3, 4), (5,), (10, 12))
LENGTH = 12 + 5 + 120


@of("transform")
def test_a_transform_is_a_pure_function_of_numbers_and_seed(cls):
    step = Chain(made(cls).parts).with_shapes(SHAPES)
    arrived = []
    for seed in (1, 1):
        sent = vector(LENGTH)
        payload = step.on_client(Dense(sent), seed)
        assert torch.equal(sent, vector(LENGTH))
        before = payload.to_dense().clone()
        arrived.append(step.on_server(payload, seed, LENGTH).to_dense())
        assert torch.equal(payload.to_dense(), before)
        assert payload.size == step.sent_size(LENGTH)
    assert torch.equal(*arrived)
    assert arrived[0].shape == (LENGTH,)
    payload = step.on_client(Dense(torch.zeros(LENGTH)), seed=1)
    assert not step.on_server(payload, seed=1, size=LENGTH).to_dense().any()


@of("transform")
def test_a_transform_with_feedback_loses_nothing_or_is_refused(cls):
    chain = Chain(made(cls).parts).with_shapes(SHAPES)
    if chain.scaling is not None:
        with pytest.raises(ConfigurationError, match=chain.scaling.name):
            ErrorFeedback(chain.parts)
        return
    memory, total = None, torch.zeros(LENGTH)
    for index in range(6):
        payload, memory = with_memory(chain, vector(LENGTH, seed=index), memory, seed=index)
        total += chain.on_server(payload, index, LENGTH).to_dense()
    wanted = sum(vector(LENGTH, seed=index) for index in range(6))
    torch.testing.assert_close(total + memory, wanted, rtol=1e-5, atol=1e-4)
    assert float(memory.norm()) < 6 * float(wanted.norm())


# Corrections and personalisations


def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ToyModule(batch_norm=True)


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
    rule, network = made(cls), module()
    names = rule.names(network)
    assert names == made(cls).names(module())
    parameters = {name for name, _ in network.named_parameters()}
    everything = parameters | {name for name, _ in network.named_buffers()}
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
