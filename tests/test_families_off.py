"""Every member that can be switched off changes nothing then: to the bit, or to rounding.

A member that is exported must be in one of the lists here, `ALWAYS_ON` being the last.
"""

import math

import numpy as np
import pytest
import torch
from families import ROWS, TABLE, made, of
from lightning.pytorch import seed_everything
from torch.nn import functional
from toys import ToyModule, toy_data, toy_trainer, weights

import fl_lightning as fl
from fl_lightning import client, data, secure, server, updates
from fl_lightning.client import Correction
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.data import Population
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.server import Server
from fl_lightning.server.protected import Terms
from fl_lightning.server.server import as_aggregator
from fl_lightning.updates import Chain, ErrorFeedback, PowerSGD, RandomK, TopK

ALIKE = fl.Mean(weight_by_examples=False)


# Aggregators and robust rules: (switched off, what it is then)

THE_SAME = [
    (fl.OverlapMean(), fl.Mean()),
    (server.AFL(step=0.0), ALIKE),
    (server.QFedAvg(q=0.0), ALIKE),
    (server.TiltedMean(tilt=0.0), fl.Mean()),
    (server.Bucketing(server.Krum(1), bucket_size=1), server.Krum(1)),
]
ALMOST_THE_SAME = [
    (fl.NormalisedMean(), fl.Mean()),  # the steps are equal
    (server.ClusterFedAvg(num_clusters=1), ALIKE),
    (server.FLoRA([1]), fl.Mean()),  # of a model without adapters
    (server.FedExLoRA(), fl.Mean()),
    (server.FlexLoRA([1]), fl.Mean()),
    (server.HetLoRA([1]), fl.Mean()),
    (secure.EncryptedMean(), fl.Mean()),
    (secure.SecureMean(clip=8.0), fl.Mean()),
    (server.Bulyan(0), ALIKE),
    (server.CentredClipping(radius=math.inf), ALIKE),
    (server.GeometricMedian(smoothing=1e9), ALIKE),
    (server.MultiKrum(0), ALIKE),
    (server.NearestNeighbourMixing(server.Krum(1), num_attackers=0), ALIKE),
    (server.NormBounding(bound=math.inf), ALIKE),
    (server.TrimmedMean(0), ALIKE),
]


def aggregate(given):
    """Return what a server moves by after a round of seven updates."""
    aggregator, random = as_aggregator(given), torch.Generator().manual_seed(0)
    if aggregator.protection is not None:
        aggregator.protection.begin(Terms(most_clients=7))
    one = Server(GlobalModel(torch.zeros(6), torch.zeros(0)), aggregator)
    one.open_round()
    for number in range(7):
        delta, loss = torch.randn(6, generator=random), torch.rand((), generator=random)
        options = {"metrics": {"train/loss": loss}, "effective_steps": 2.0}
        one.receive(ClientUpdate(number, delta, torch.empty(0), 3 + 5 * number % 7, 2, **options))
    one.close_round()
    return one.model.params


def named(pair):
    return type(pair[0]).__name__


@pytest.mark.parametrize("pair", THE_SAME, ids=named)
def test_an_aggregator_that_is_off_is_another_to_the_bit(pair):
    assert torch.equal(*map(aggregate, pair))


@pytest.mark.parametrize("pair", ALMOST_THE_SAME, ids=named)
def test_an_aggregator_that_is_off_is_another_but_for_rounding(pair):
    torch.testing.assert_close(*map(aggregate, pair), rtol=1e-5, atol=1e-5)


# Transforms

IDENTITIES = [
    Chain(),
    ErrorFeedback([Chain()]),
    PowerSGD(rank=8),
    RandomK(1.0),
    TopK(1.0),
]


# Cohorts


@of("cohort")
def test_a_cohort_of_all_is_everybody(cls):
    """Those of a size with it, coins that all come up, clients that are always there."""
    population = Population(np.arange(1, 13))
    population.note([3, 5], round_index=0, losses={3: 0.5, 5: 1.5})
    options = {
        fl.AllClients: {},
        fl.PoissonCohort: {"fraction": 1.0},
        data.AvailableCohort: {
            "sampler": fl.AllClients(),
            "availability": data.Stretches(fraction=1.0),
        },
        data.PowerOfChoiceCohort: {"size": 12, "num_candidates": 12},
    }.get(cls, {"size": 12})
    for index in range(3):
        ids = made(cls, **options).sample(index, population, seed=1)
        assert ids.tolist() == list(range(12))


# Partitions


@of("partition")
def test_one_client_has_everything(cls):
    labels = np.zeros(30) if cls is data.NaturalPartition else np.arange(30) % 3
    options = {"classes_per_client": 3} if cls is data.LabelShards else {}
    [shard] = made(cls, **options).assign(labels, num_clients=1, seed=0)
    assert shard.tolist() == list(range(30))


# Members with little of their own

EVERYBODY = [data.Diurnal(mean=1.0, amplitude=0.0), data.Stretches(fraction=1.0)]
EQUAL_SPEEDS = [
    client.GivenSpeeds([2.0]),
    client.LogNormalSpeeds(median=2.0, sigma=0.0),
    client.SpeedTiers(seconds=[2.0, 2.0]),
]
BLIND = [server.HingeStaleness(slope=0.0), server.PolynomialStaleness(0.0)]
PATIENT = [server.FedAsync(concurrency=1, mixing=1.0), server.FedBuff(concurrency=1)]


@pytest.mark.parametrize("availability", EVERYBODY, ids=repr)
def test_clients_that_are_always_there_are_there(availability):
    assert all(availability.available(index, 20, seed=0).all() for index in range(30))


@pytest.mark.parametrize("speeds", EQUAL_SPEEDS, ids=repr)
def test_devices_without_spread_are_alike(speeds):
    assert speeds.seconds_per_step(6, seed=0).tolist() == [2.0] * 6


@pytest.mark.parametrize("staleness", BLIND, ids=repr)
def test_staleness_without_a_slope_weighs_nothing(staleness):
    assert [staleness.weight(tau) for tau in range(30)] == [1.0] * 30


@pytest.mark.parametrize("rule", PATIENT, ids=repr)
def test_an_update_that_is_not_stale_counts_in_full(rule):
    deltas = torch.randn(3, 5)
    assert torch.equal(rule.weighed(deltas, staleness=0, drift=None), deltas)


@of("optimizer")
def test_an_optimizer_without_a_rate_moves_nothing(cls):
    optimizer = made(cls, lr=0.0)
    [param] = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    for _ in range(3):
        param.grad = torch.randn(param.shape)
        optimizer.step()
    assert torch.equal(param, before)


# Runs: a member that is off, and what else is asked for


class Seeing(ToyModule):
    """One with features for MOON, and logits by its forward for FedLC."""

    def forward(self, x):
        return self.net(x)

    def features(self, batch):
        return self.net[:3](batch[0])

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])


OPTION = {
    "correction": lambda member: {"correction": member},
    "personalisation": lambda member: {"personal": member},
    "transform": lambda member: {"updates": [member]},
    "privacy": lambda member: {"privacy": member},
    "forgery": lambda member: {"attackers": Attackers(fraction=0.5, forge=member)},
    "poison": lambda member: {"attackers": Attackers(fraction=0.5, poison=member)},
}
NOTHING = {"clip_norm": math.inf, "noise_multiplier": 0.0, "secure_noise": False}
RUNS = [
    (fl.FedLC(tau=0.0), {}),
    (fl.FedProx(mu=0.0), {}),
    (fl.Moon(mu=0.0), {}),
    *((fl.Scaffold(option), {"rounds": 1}) for option in ("I", "II")),  # nobody remembers anything
    (fl.APFL(), {}),
    (fl.Ditto(pull=0.5), {}),
    (fl.FineTuned(local_steps=1), {}),
    *((step, {}) for step in IDENTITIES),
    (fl.BandedMatrixDP(**NOTHING), {"aggregator": ALIKE, "cohort": data.RoundRobinCohort(size=3)}),
    (fl.CentralDP(**NOTHING), {"aggregator": ALIKE}),
    (fl.CentralDP(**NOTHING), {"aggregator": fl.Mean(weight_by_examples=False, exact=True)}),
    (fl.DistributedDP(**NOTHING), {"aggregator": ALIKE}),
    (fl.LocalDP(**NOTHING), {"aggregator": ALIKE}),
    (fl.ExampleDP(**NOTHING), {"batch_size": 64}),  # of whole shards: coins draw all of them
    (server.Scaling(factor=1.0), {}),
    (data.LabelFlip(3, share=0.0), {}),
    (data.Trigger(1, share=0.0), {}),
]
CORRECTIONS = [member for member, _ in RUNS if isinstance(member, Correction)]
WITHOUT = {}  # where runs without any of them end, by the other options
ONE_AT_A_TIME = (fl.FedLC, fl.Moon, fl.APFL, fl.Ditto, fl.ExampleDP)  # slots decline them


def run(*, rounds=2, batch_size=4, **block):
    """Return the model after some rounds of three of six clients; other options replace ours."""
    seed_everything(0, verbose=False)
    module, source = Seeing(), toy_data(batch_size=batch_size)
    defaults = {"cohort": fl.UniformCohort(size=3), "local_steps": 2, "seed": 4}
    federation = fl.Federation(**defaults | block)
    toy_trainer(federation, max_epochs=rounds).fit(module, datamodule=source)
    return weights(module)


def engines_of(case):
    """Both for corrections, which act in local steps; else one or the other, in turn."""
    if type(case[0]) in ONE_AT_A_TIME:
        return ["sequential"]
    both = ["sequential", "slots"]
    return both if case[0] in CORRECTIONS else [both[RUNS.index(case) % 2]]


@pytest.mark.parametrize("rule", CORRECTIONS, ids=repr)
def test_a_correction_that_is_off_adds_nothing_to_gradients(rule):
    """A run without a correction is one with such a rule: both could be wrong."""
    assert (rule.pull, rule.shift(None, None)) == (0, None)


@pytest.mark.filterwarnings("ignore:privacy:UserWarning")
@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, id=f"{named(case)}-{engine}")
        for case in RUNS
        for engine in engines_of(case)
    ],
)
def test_a_run_with_a_member_that_is_off_is_the_run_without(case, engine):
    member, others = case
    [family] = (family for family, cls in ROWS if cls is type(member))
    # all clients in slots: the order of a sum is that of their ids
    others = {"engine": engine, "pad_batches": engine == "slots", **others}
    if str(others) not in WITHOUT:
        WITHOUT[str(others)] = run(**others)
    assert torch.equal(run(**others, **OPTION[family](member)), WITHOUT[str(others)])


# What has no value that switches it off, or none that another test of this file could try

ALWAYS_ON = {
    fl.Mean,
    server.Median,
    server.FLTrust,
    server.Krum,
    fl.FedDyn,
    fl.Personal,
    updates.Affine,
    updates.Cast,
    updates.QSGD,
    updates.Sign,
    server.ALIE,
    server.GaussianNoise,
    server.InnerProductManipulation,
    server.MinMax,
    server.SignFlip,
    *TABLE["sensitivity"],
    *TABLE["order of entries"],
    *TABLE["fit of a head"],
}


def test_every_member_is_off_somewhere_or_always_on():
    members = [member for member, _ in (*THE_SAME, *ALMOST_THE_SAME, *RUNS)]
    members += [*IDENTITIES, *EVERYBODY, *EQUAL_SPEEDS, *BLIND, *PATIENT]
    tried = {type(member) for member in members} | {
        cls for family, cls in ROWS if family in ("cohort", "partition", "optimizer")
    }
    assert not tried & ALWAYS_ON
    assert {cls for _, cls in ROWS} == tried | ALWAYS_ON
