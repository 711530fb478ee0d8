"""A round that cannot be trusted stops, with the client named."""

import numpy as np
import pytest
import torch
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import (
    ClientFailure,
    ConfigurationError,
    FedDyn,
    Federation,
    PoissonCohort,
    RoundFailure,
    Scaffold,
    UniformCohort,
)
from fl_lightning.data import Cohort
from fl_lightning.federation.stage import Learning
from fl_lightning.server import AFL, QFedAvg, TiltedMean


class Sabotaged(ToyModule):
    """Fails on clients whose shard holds the example with the given first feature."""

    def __init__(self, how, bad_examples):
        super().__init__()
        self.how, self.bad = how, bad_examples

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = (batch[0][:, :1] == self.bad).any()
        if self.how == "raise" and is_bad:
            raise KeyError("no such thing")
        return torch.where(is_bad, float(self.how), 1.0) * loss if self.how != "raise" else loss


def sabotage(how, clients=(2,), data=None):
    data = data or toy_data()
    data.setup("fit")
    bad = data.train_dataset.tensors[0][[i for k in clients for i in data.clients[k].tolist()], 0]
    return Sabotaged(how, bad), data


def fit(module, data, max_epochs=2, **options):
    trainer = toy_trainer(Federation(seed=0, **options), max_epochs=max_epochs)
    trainer.fit(module, datamodule=data)
    return trainer


@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_loss_that_is_not_finite_names_the_client(how):
    with pytest.raises(ClientFailure, match=r"round 1, client 2: its training loss is (nan|inf)"):
        fit(*sabotage(how))


def test_an_exception_names_the_client_and_keeps_its_traceback():
    with pytest.raises(ClientFailure, match="round 1, client 2: KeyError") as caught:
        fit(*sabotage("raise"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback is not None


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize(
    ("correction", "engine"), [(Scaffold, "sequential"), (Scaffold, "slots"), (FedDyn, "slots")]
)
def test_a_client_that_a_later_stage_skips_has_learnt_nothing(engine, correction):
    """Its control variate had moved, and the mean of all with it."""

    class Refuses(Learning):
        def learn(self, update, work, start):
            if update.client_id == 2:
                raise ClientFailure(2, "it learns nothing here")
            return lambda: learnt.append(update.client_id)

    ends, learnt = [], []
    for stages, clients in (([Refuses()], ()), ([], (2,))):
        torch.manual_seed(0)
        options = {"correction": correction(), "stages": stages, "engine": engine}
        module, data = sabotage("nan", clients)
        trainer = fit(module, data, on_client_failure="skip", **options)
        assert trainer.callback_metrics["round/skipped"] == 1
        [federation] = (c for c in trainer.callbacks if isinstance(c, Federation))
        remembered = federation.rounds.memory
        assert [k for k in range(6) if remembered.get("correction", k) is None] == [2]
        ends.append(weights(module))
    assert sorted(learnt) == [0, 0, 1, 1, 3, 3, 4, 4, 5, 5]
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


class Reports(Sabotaged):
    """Logs a loss of its own, which is not finite on clients whose shard holds the bad examples."""

    def training_step(self, batch, batch_idx):
        loss = ToyModule.training_step(self, batch, batch_idx)
        is_bad = (batch[0][:, :1] == self.bad).any()
        self.log("train/loss", torch.where(is_bad, float(self.how), 1.0) * loss)
        return loss


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize(
    ("rule", "engine"),
    [(QFedAvg(), "slots"), (TiltedMean(), "sequential"), (TiltedMean(), "slots"), (AFL(), "slots")],
)
def test_a_loss_that_cannot_weight_an_update_is_a_failure_of_its_client(rule, engine):
    ends = []
    for kind, how in ((Sabotaged, "nan"), (Reports, "nan")):
        torch.manual_seed(0)
        _, data = sabotage(how)
        module = kind(how, sabotage(how)[0].bad)
        module.momentum = 0.0
        trainer = fit(module, data, aggregator=rule, engine=engine, on_client_failure="skip")
        assert trainer.callback_metrics["round/skipped"] == 1
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
    with pytest.raises(ClientFailure, match="round 1, client 2: it has logged a train/loss of nan"):
        fit(module, data, aggregator=rule, engine=engine)


def test_a_failed_round_leaves_the_global_model_in_the_module():
    module, data = sabotage("raise")
    before = weights(module)
    with pytest.raises(ClientFailure):
        fit(module, data)
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("how", ["nan", "raise"])
def test_skipped_clients_are_counted_and_leave_no_trace(how):
    module, data = sabotage(how)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match="skipped: round 1, client 2"):
        trainer = fit(module, data, max_epochs=1, on_client_failure="skip")
    assert trainer.callback_metrics["round/skipped"] == 1
    assert trainer.callback_metrics["round/cohort_size"] == 6

    class WithoutClient2(Cohort):
        def expected_size(self, num_clients):
            return num_clients - 1

        def sample(self, round_index, population, seed):
            return np.array([0, 1, 3, 4, 5])

    healthy = ToyModule()
    healthy.load_state_dict(start)
    fit(healthy, toy_data(), max_epochs=1, cohort=WithoutClient2())
    assert torch.equal(weights(module), weights(healthy))


def test_a_server_step_that_breaks_the_model_is_named_in_its_own_round():
    def overshoot(params):
        return torch.optim.SGD(params, lr=float("inf"))

    module = ToyModule()
    before = weights(module)
    with pytest.raises(RoundFailure, match="round 1: after the server's step"):
        fit(module, toy_data(), server_optimizer=overshoot)
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize(("bad", "options"), [(range(4), {"min_replies": 3}), (range(6), {})])
def test_too_few_replies_stop_the_run(bad, options):
    module, data = sabotage("nan", clients=bad)
    says = pytest.raises(RoundFailure, match=f"{6 - len(bad)} of 6")
    with pytest.warns(UserWarning, match="skipped"), says:
        fit(module, data, on_client_failure="skip", **options)


def test_an_update_that_is_not_finite_is_caught_though_the_loss_is_fine():
    class Explodes(ToyModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e38)

    with pytest.raises(ClientFailure, match=r"client 0: its (update|training loss|buffers)"):
        fit(Explodes(), toy_data(), local_steps=2)


class SomeEmpty:
    def assign(self, labels, num_clients, seed):
        return [np.arange(len(labels)), *[np.empty(0, np.int64)] * (num_clients - 1)]


def test_clients_without_examples_are_found_at_the_door():
    data = toy_data(num_clients=3, partition=SomeEmpty())
    with pytest.raises(ConfigurationError, match=r"2 of 3 clients .* \(client 1, 2\)"):
        fit(ToyModule(), data)


def test_clients_without_examples_can_be_skipped():
    data = toy_data(num_clients=3, partition=SomeEmpty())
    with pytest.warns(UserWarning, match="shard is empty"):
        trainer = fit(ToyModule(), data, on_client_failure="skip")
    assert trainer.callback_metrics["round/skipped"] == 2


def test_an_empty_draw_is_a_round_without_movement():
    module = ToyModule()
    before = weights(module)
    trainer = fit(module, toy_data(), cohort=PoissonCohort(fraction=1e-9))
    assert torch.equal(weights(module), before)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["round/cohort_size"] == 0


@pytest.mark.parametrize(
    ("cohort", "most"),
    [
        (UniformCohort(size=2), 2),
        (PoissonCohort(fraction=0.1), 6),
    ],
)
def test_more_replies_than_a_round_has_clients(cohort, most):
    with pytest.raises(ConfigurationError, match=f"at most {most} clients"):
        fit(ToyModule(), toy_data(), cohort=cohort, min_replies=most + 1)


def test_a_cohort_larger_than_the_population():
    with pytest.raises(ConfigurationError, match="9 clients but there are only 6"):
        fit(ToyModule(), toy_data(), cohort=UniformCohort(size=9))


class Sizes:
    """Shards of given sizes, one after the other."""

    uses_labels = False

    def __init__(self, *sizes):
        self.sizes = sizes

    def assign(self, labels, num_clients, seed):
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


class Spread(ToyModule):
    """With a term that is NaN on one example."""

    def training_step(self, batch, batch_idx):
        values = self.net(batch[0])
        squares = (values - values.mean(0)).square().sum()
        return super().training_step(batch, batch_idx) + squares / (len(values) - 1)


class TestOneExample:
    """What a batch of one example is too few for fails with what helps."""

    @staticmethod
    def run(module, *sizes, drop_last=False, **options):
        data = toy_data(num_clients=len(sizes), partition=Sizes(*sizes), drop_last=drop_last)
        fit(module, data, max_epochs=1, engine="sequential", **options)

    @pytest.mark.parametrize("module", [ToyModule(batch_norm=True), Spread()], ids=["norm", "nan"])
    def test_as_the_last_batch(self, module):
        with pytest.raises(ClientFailure, match=r"client 1: .*one example.*drop_last.*batch_size"):
            self.run(module, 16, 17, 27)
        self.run(module, 16, 17, 27, drop_last=True)  # as the message says

    def test_as_all_that_a_client_has(self):
        with pytest.raises(ClientFailure, match=r"client 2: .*more than 1 value.*min_examples"):
            self.run(ToyModule(batch_norm=True), 16, 43, 1, drop_last=True)

    def test_in_the_gradient_of_a_whole_shard(self):
        with pytest.raises(ClientFailure, match=r"whole shard: .*one example.*drop_last"):
            self.run(ToyModule(batch_norm=True), 17, 43, local_steps=1, correction=Scaffold("I"))

    def test_other_failures_are_not_put_down_to_it(self):
        with pytest.raises(ClientFailure) as caught:
            fit(*sabotage("raise"))
        assert "one example" not in str(caught.value)
