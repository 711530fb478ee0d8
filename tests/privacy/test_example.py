"""ε of examples: dp-accounting itself, the client that pays most, noise for a budget."""

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fl_lightning import AllClients, ConfigurationError, ExampleDP, PoissonCohort, UniformCohort
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.mechanism import AccountedRun, LocalSampling


def run(num_examples, num_steps=4, batch_size=10, cohort=None, rounds=6):
    n = np.array(num_examples)
    local = LocalSampling(n, batch_size, np.broadcast_to(num_steps, n.shape).copy())
    return AccountedRun(cohort or AllClients(), len(n), rounds, seed=0, local=local)


def mechanism(of, **options):
    return ExampleDP(**{"clip_norm": 1.0, "noise_multiplier": 1.3, **options}).mechanism(of)


@pytest.mark.parametrize(("method", "kind"), [("pld", PLDAccountant), ("rdp", RdpAccountant)])
def test_it_is_what_dp_accounting_says_of_the_local_steps(method, kind):
    accountant = kind()
    event = dp.PoissonSampledDpEvent(10 / 80, dp.GaussianDpEvent(1.3))
    accountant.compose(event, 6 * 4)
    made = mechanism(run([80, 80]), accountant=method)
    assert made.epsilon(6) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-4)


def test_clients_do_not_add_up_and_the_one_that_pays_most_counts():
    """Of shards of 20, 80 and 400 the smallest samples most; turns count, not rounds."""
    alone = mechanism(run([20])).epsilon(6)
    assert mechanism(run([80, 20, 400])).epsilon(6) == alone
    assert mechanism(run([80, 400])).epsilon(6) < alone
    turns = mechanism(run([20, 20, 20], cohort=RoundRobinCohort(size=1)))
    assert turns.turns(6).tolist() == [2, 2, 2]
    assert turns.epsilon(6) == mechanism(run([20], rounds=2)).epsilon(2)
    more_steps = mechanism(run([20, 80], num_steps=np.array([1, 40])))
    assert more_steps.work(6) == [(20, 10, 6), (80, 10, 240)]
    assert more_steps.epsilon(6) == mechanism(run([80], num_steps=40)).epsilon(6)


def test_cohorts_amplify_nothing():
    cohort = UniformCohort(size=1)
    made = mechanism(run([20] * 4, cohort=cohort, rounds=8))
    turns = int(made.turns(8).max())
    assert 2 <= turns < 8
    assert made.epsilon(8) == mechanism(run([20], rounds=turns)).epsilon(turns)


def test_a_shard_within_one_batch_is_not_sampled():
    made = mechanism(run([7], num_steps=3))
    assert made.epsilon(6) == pytest.approx(gaussian_epsilon(1.3 / 18**0.5, 1e-5))
    assert made.noise_of_gradients == pytest.approx(1.3 / 7)
    assert mechanism(run([0, 80])).epsilon(6) == mechanism(run([80])).epsilon(6)


def test_noise_is_found_for_the_client_that_pays_most():
    made = mechanism(run([30, 60, 90]), noise_multiplier=None, epsilon=3.0)
    assert 3.0 - 1e-3 < made.epsilon(6) <= 3.0
    assert made.noise_multiplier == pytest.approx(
        mechanism(run([30]), noise_multiplier=None, epsilon=3.0).noise_multiplier, rel=1e-4
    )


def test_what_cannot_be_accounted_for_is_refused():
    with pytest.raises(ConfigurationError, match="needs noise_multiplier"):
        ExampleDP(clip_norm=1.0)
    with pytest.raises(ConfigurationError, match="no information about them"):
        mechanism(AccountedRun(PoissonCohort(fraction=0.5), 3, 3, seed=0))
    with pytest.raises(ConfigurationError, match=r"set\s+trainer.max_epochs"):
        mechanism(run([20], rounds=None), noise_multiplier=None, epsilon=1.0)
