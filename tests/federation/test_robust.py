"""Robust rules, attackers, server optimizers and schedules inside a fit."""

from functools import partial

import pytest
import torch
from toys import Given, ToyData, ToyModule, federated, toy_data, weights

from fl_lightning import (
    ConfigurationError,
    PoissonCohort,
    RoundFailure,
    UniformCohort,
)
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.client_examples import LabelFlip
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.server.attacks import SignFlip
from fl_lightning.server.means.fair_means import QFedAvg
from fl_lightning.server.robust.krum import Krum
from fl_lightning.server.robust.reweighted import FLTrust
from fl_lightning.server.robust.rule import Median


def fit(momentum=0.9, data=None, trainer=None, **options):
    make = partial(ToyModule, scheduler=False, momentum=momentum)
    given = {"data": data or toy_data(batch_size=4), "trainer": trainer}
    return federated(make, **given, **{"local_steps": 2, "engine": "sequential"} | options)[:2]


class TestTheRateThatQFedAvgTakes:
    def test_it_is_that_of_the_clients(self):
        ends = [fit(aggregator=QFedAvg(2.0, lr), momentum=0.0)[0] for lr in (None, 0.1)]
        assert torch.equal(*map(weights, ends))

    def test_another_one_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"local_lr is 0\.3, .* has lr 0\.1: leave"):
            fit(aggregator=QFedAvg(2.0, 0.3), momentum=0.0)

    def test_other_steps_are_refused_unless_they_do_not_count(self):
        with pytest.raises(ConfigurationError, match="with momentum 0"):
            fit(aggregator=QFedAvg(2.0))
        plain, fair = fit()[0], fit(aggregator=QFedAvg(0.0, weight_by_examples=True))[0]
        assert torch.equal(weights(plain), weights(fair))


def test_attackers_learn_from_other_labels_and_others_do_not():
    honest, _ = fit()
    for fraction, same in ((0.0, True), (0.5, False)):
        data = toy_data(batch_size=4)
        module, _ = fit(attackers=Attackers(fraction=fraction, poison=LabelFlip(3)), data=data)
        assert torch.equal(weights(module), weights(honest)) == same
        batch = data.train_batch(torch.arange(60))  # afterwards the data are as they were
        assert torch.equal(batch[1], data.train_dataset.tensors[1])


def test_a_defence_withstands_what_the_mean_does_not():
    attackers = Attackers(fraction=0.34, forge=SignFlip(20.0))
    validated = {"trainer": {"limit_val_batches": 1.0}}
    _, expected = fit(aggregator=Median(), **validated)
    _, undefended = fit(attackers=attackers, **validated)
    _, defended = fit(attackers=attackers, aggregator=Median(), **validated)
    losses = [float(t.callback_metrics["val/loss"]) for t in (expected, defended, undefended)]
    assert losses[1] < losses[0] + 0.3
    assert losses[2] > losses[0] + 1.0


class TestRefusals:
    def test_a_cohort_too_small_for_the_rule_before_anything_trains(self):
        with pytest.raises(ConfigurationError, match=r"Krum\(num_attackers=2\) needs at least 7"):
            fit(aggregator=Krum(2))

    def test_a_round_that_came_out_too_small(self):
        with pytest.raises(RoundFailure, match="needs at least 5 updates, got"):
            fit(aggregator=Krum(1), cohort=PoissonCohort(fraction=0.3))

    def test_a_schedule_that_waits_for_a_metric(self):
        with pytest.raises(ConfigurationError, match="server_schedule"):
            fit(server_schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize("cohort", [UniformCohort(fraction=0.8), PoissonCohort(fraction=0.8)])
def test_rounds_without_the_trusted_client_are_refused_at_the_door(cohort):
    with pytest.raises(
        ConfigurationError, match="FLTrust needs the update of client 0 in every round"
    ):
        fit(aggregator=FLTrust(), cohort=cohort)
    fit(aggregator=FLTrust(), cohort=UniformCohort(fraction=1.0))


def test_attackers_do_not_change_what_others_train_on():
    def data(shards):
        return FederatedDataModule(ToyData(), num_clients=2, partition=Given(shards), seed=0)

    attackers = Attackers(fraction=0.5, poison=LabelFlip(3), seed=0)
    apart, overlapping = (range(30), range(30, 60)), (range(30), range(29, 60))
    fit(attackers=attackers, data=data(apart))
    with pytest.raises(ConfigurationError, match="example 29 is in shards of attackers and of"):
        fit(attackers=attackers, data=data(overlapping))
