"""Asynchronous rounds: who arrives when by hand, weights by hand, FedAvg where nobody is late."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from test_devices import run
from test_masks import Masked, some_masks
from torch import nn
from toys import SaveEverywhere, ToyModule, federated, toy_data, toy_trainer, weights

from fl_lightning import ConfigurationError, Federation, Mean
from fl_lightning.client import Devices, GivenSpeeds, LogNormalSpeeds, RecordedArrivals
from fl_lightning.client.clocks import VirtualClock, write_arrivals
from fl_lightning.client.devices import WorkResult
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.data import Cohort
from fl_lightning.federation.stage import Start, Upload
from fl_lightning.federation.stages.asynchrony import Arrivals, StaleUpdates
from fl_lightning.server import FedAsync, FedBuff, PolynomialStaleness
from fl_lightning.server.server import Server

EQUAL = Devices(speeds=GivenSpeeds([1.0]))
UNEQUAL = Devices(speeds=LogNormalSpeeds(sigma=1.0), jitter=0.2, drop_rate=0.1)


def counted(updates, start, rule):
    [upload] = StaleUpdates(rule).up(Upload(start, updates, updates))
    return upload.arrived


def test_the_published_weights():
    """D = [1, 0], [0, 2], [-1, 1] with staleness 0, 1, 3 weigh 1, 0.7071, 0.5: the sum over 3."""
    model = GlobalModel(torch.zeros(2), torch.empty(0))
    server = Server(model, Mean(weight_by_examples=False))
    server.open_round()
    rule = FedBuff(concurrency=3, buffer_size=3)
    for delta, tau in (([-1.0, 0], 0), ([0, -2.0], 1), ([1.0, -1], 3)):
        update = ClientUpdate(0, torch.tensor(delta), torch.empty(0), 10, 1)
        server.receive(counted(Updates.of(update), Start(model, model, tau), rule))
    server.close_round()
    expected = torch.tensor([0.166667, 0.638071])
    torch.testing.assert_close(server.model.params, expected, rtol=0, atol=5e-7)


@given(x=st.floats(-5, 5), y=st.floats(-5, 5), start=st.floats(-5, 5), tau=st.integers(0, 9))
def test_fedasync_mixes_models(x, y, start, tau):
    rule = FedAsync(concurrency=2, mixing=0.6, staleness=PolynomialStaleness(0.5))
    start = x if tau == 0 else start
    drift = torch.tensor([x - start], dtype=torch.float64) if tau else None
    moved = rule.weighed(torch.tensor([start - y], dtype=torch.float64), tau, drift)
    alpha = 0.6 * (1 + tau) ** -0.5
    assert x - float(moved) == pytest.approx((1 - alpha) * x + alpha * y, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "tau", "share"),
    [
        (FedAsync(concurrency=2, mixing=0.6), 3, 0.3),
        (FedBuff(concurrency=2), 3, 0.5),
        (FedBuff(concurrency=2), 0, 1.0),
    ],
)
def test_buffers_are_mixed_by_the_same_weight(rule, tau, share):
    first, present = (GlobalModel(torch.zeros(1), torch.tensor([v, 2.0])) for v in (9.0, 1.0))
    start = Start(first if tau else present, present, tau)
    buffers = torch.tensor([[3.0, 2.0], [0.1, 7.0]])
    expected = (1 - share) * present.buffers + share * buffers
    group = counted(Updates([0, 1], torch.zeros(2, 1), buffers, [1, 1], [1, 1]), start, rule)
    torch.testing.assert_close(group.buffers, expected)
    one = counted(Updates.of(ClientUpdate(0, torch.zeros(1), buffers[1], 1, 1)), start, rule)
    assert torch.equal(one.buffers[0], group.buffers[1])
    if share == 1:
        assert torch.equal(group.buffers, buffers)


def told(speeds, concurrency, buffer_size, lost=()):
    def result(client, start):
        return WorkResult(1, speeds[client], (client, start) in lost)

    return Arrivals(VirtualClock(result), len(speeds), concurrency, buffer_size, seed=0)


def test_arrivals_by_hand():
    """Client 0 takes 1 s, client 1 takes 2.5 s, both always at work, one update per step."""
    arrivals = told([1.0, 2.5], 2, 1)
    found = [(arrivals.step(n).versions, arrivals.step(n).seconds) for n in range(7)]
    assert found == [
        ({0: 0}, 1.0),
        ({0: 1}, 2.0),
        ({1: 0}, 2.5),
        ({0: 2}, 3.0),
        ({0: 4}, 4.0),
        ({1: 3}, 5.0),
        ({0: 5}, 5.0),
    ] or found[-2:] == [({0: 5}, 5.0), ({1: 3}, 5.0)]


def test_a_lost_update_frees_its_place():
    arrivals = told([1.0, 10.0], 1, 1, lost={(c, 0) for c in range(2)})
    step = arrivals.step(0)
    assert list(step.versions.values()) == [0]
    assert step.seconds > 1.0  # whoever was started first was lost


@given(
    num_clients=st.integers(1, 12),
    data=st.data(),
    seed=st.integers(0, 2**40),
    sigma=st.floats(0, 2),
)
def test_arrivals_are_consistent(num_clients, data, seed, sigma):
    concurrency = data.draw(st.integers(1, num_clients))
    buffer_size = data.draw(st.integers(1, num_clients))
    speeds = LogNormalSpeeds(sigma=sigma).seconds_per_step(num_clients, seed)

    def result(client, start):
        return WorkResult(1, float(speeds[client]), start % 5 == 4)

    def steps(order):
        arrivals = Arrivals(VirtualClock(result), num_clients, concurrency, buffer_size, seed)
        return {n: arrivals.step(n) for n in order}

    found = steps(range(12))
    assert found == steps([11, *range(11)])  # a function of the step, however it is asked for
    trained, last = set(), 0.0
    for number, step in found.items():
        assert len(step.versions) == buffer_size
        assert list(step.versions) == sorted(step.versions)
        assert step.seconds >= last
        last = step.seconds
        for client, version in step.versions.items():
            assert version <= number
            assert (client, version) not in trained  # of one version a client trains once
            trained.add((client, version))
        for later in range(number + 1, 12):  # what will be needed is kept
            old = {v for v in found[later].versions.values() if v <= number}
            assert old <= step.in_flight
        assert len(step.in_flight) <= concurrency + buffer_size


def test_with_equal_devices_nobody_is_late_and_it_is_fedavg():
    settings = {"local_steps": 3}
    plain, *_ = run(None, **settings)
    rule = FedBuff(concurrency=6, buffer_size=6)
    buffered, rows, _ = run(EQUAL, asynchronous=rule, **settings)
    assert torch.equal(weights(buffered), weights(plain))
    assert [row["total_virtual_seconds"] for row in rows] == [3.0, 6.0, 9.0]


def test_fedasync_of_one_client_at_a_time_is_fedavg_of_it():
    rule = FedAsync(concurrency=1, mixing=1.0)
    mixed, _, federation = run(EQUAL, asynchronous=rule, local_steps=3)
    order = [list(federation._calendar.arrivals.step(n).versions) for n in range(3)]

    class Replay(Cohort):
        def expected_size(self, num_clients):
            return 1

        def sample(self, round_index, population, seed):
            return np.array(order[round_index])

    plain, *_ = run(None, cohort=Replay(), local_steps=3)
    assert torch.equal(weights(mixed), weights(plain))


class Quadratic(LightningModule):
    """f(x) = c^r mean (x - a)² / 2 of one number in round r, over the examples' labels a."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.factor = factor

    def training_step(self, batch, batch_idx):
        loss = (self.x - batch[1].double()).square().mean() / 2
        return self.factor**self.current_epoch * loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)]


@pytest.mark.parametrize("factor", [1.0, 0.9])
@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_stale_starts_by_a_plain_loop(engine, factor):
    """The trajectory of one number against ten lines that keep every version there was."""
    rule, data = FedBuff(concurrency=4, buffer_size=2), toy_data(batch_size=60)
    slots = {"engine": engine, "slots": 2 if engine == "slots" else None}
    alike = {"aggregator": Mean(weight_by_examples=False), "local_steps": 1, "seed": 3, **slots}
    settings = {"devices": UNEQUAL, "asynchronous": rule, "trainer": {"max_epochs": 8}}
    module, _, federation = federated(Quadratic(factor), data=data, **settings, **alike)
    means = [float(data.train_batch(shard)[1].double().mean()) for shard in data.clients]
    versions = [0.0]
    for number in range(8):
        x = versions[-1]
        for client, version in federation._calendar.arrivals.step(number).versions.items():
            # of the round in which it was started, which knows of no later one
            rate = 0.5 * (0.8 * factor) ** version
            moved = rate * (means[client] - versions[version])
            x += moved * (1 + number - version) ** -0.5 / 2
        versions.append(x)
    assert (federation.rounds.clients.engine.slots is not None) == (engine == "slots")
    assert module.x.item() == pytest.approx(versions[-1], rel=1e-6)


class OneHasNothing:
    """Clients with examples, and one without."""

    def assign(self, labels, num_clients, seed):
        return np.split(np.arange(len(labels)), [10, 20, 20, 30, 45])


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_client_without_examples_is_skipped_in_any_round():
    """Also when what it began from is the model of the very first one, which nobody keeps."""
    federation = Federation(
        devices=Devices(speeds=LogNormalSpeeds(sigma=1.0)),
        asynchronous=FedBuff(concurrency=4, buffer_size=2),
        on_client_failure="skip",
    )
    trainer = toy_trainer(federation, max_epochs=8)
    trainer.fit(ToyModule(), datamodule=toy_data(partition=OneHasNothing()))
    assert trainer.current_epoch == 8
    assert trainer.callback_metrics["round/skipped"] == 1


class Noting(VirtualClock):
    """Virtual time that notes who ended."""

    order = ()

    def wait(self):
        ended = super().wait()
        self.order += tuple(ended)
        return ended


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run, and the order of arrival in it, written down."""
    file = tmp_path_factory.mktemp("recorded") / "arrivals.csv"
    rule = FedBuff(concurrency=4, buffer_size=2)
    settings = {"asynchronous": rule, "local_steps": 2, "max_epochs": 6}
    devices = Devices(speeds=LogNormalSpeeds(sigma=1.0), jitter=0.2, drop_rate=0.3)
    module, rows, federation = run(devices, **settings)
    fleet = federation._calendar.fleet
    clock = Noting(lambda client, start: fleet.result(client, 2, draw=start))
    again = Arrivals(clock, 6, 4, 2, federation.seed)
    step = [again.step(number) for number in range(6)][-1]
    assert step == federation._calendar.arrivals.step(5)
    write_arrivals(file, clock.order, 2)
    return module, rows, settings, str(file)


def test_an_order_on_record_is_replayed_to_the_same_bits(recorded, tmp_path):
    expected, rows, settings, file = recorded
    assert any(ended.is_lost for ended in RecordedArrivals(file=file).arrivals())
    devices = RecordedArrivals(file=file)
    module, again, _ = run(devices, SaveEverywhere(tmp_path), **settings)
    assert torch.equal(weights(module), weights(expected))
    assert [row["staleness"] for row in again] == [row["staleness"] for row in rows]
    assert max(row["staleness"] for row in rows) > 0
    module, *_ = run(devices, ckpt_path=tmp_path / "3-end.ckpt", **settings)
    assert torch.equal(weights(module), weights(expected))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"max_epochs": 9}, "the recorded run had no more rounds"),
        ({"asynchronous": FedBuff(concurrency=3, buffer_size=2)}, "is not at work from version"),
        (
            {"asynchronous": None},
            "RecordedArrivals replays an asynchronous run: set federation.asynchronous as well",
        ),
    ],
)
def test_a_record_of_another_run_is_refused(recorded, other, message):
    _, _, settings, file = recorded
    with pytest.raises(ConfigurationError, match=message):
        run(RecordedArrivals(file=file), **settings | other)


def test_a_record_must_be_one(tmp_path):
    head = "round,client,version,seconds,lost\n"
    for text in (None, "a,b\n1,2\n", f"{head}0,x,0,1,0\n", f"{head}0,1,0\n"):
        file = tmp_path / "arrivals.csv"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigurationError, match="is no record of arrivals"):
            RecordedArrivals(file=str(file))


def test_a_checkpoint_of_another_story_is_refused(tmp_path):
    rule = FedBuff(concurrency=4, buffer_size=2)
    settings = {"devices": UNEQUAL, "asynchronous": rule, "local_steps": 1}
    run(UNEQUAL, SaveEverywhere(tmp_path), asynchronous=rule, local_steps=1, max_epochs=2)
    for other, message in (
        ({"devices": EQUAL}, "other devices or another asynchronous rule"),
        ({"asynchronous": FedBuff(concurrency=3, buffer_size=2)}, "other devices or another"),
        ({"devices": None, "asynchronous": None}, "choice of federation.asynchronous"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run(**{**settings, **other}, max_epochs=3, ckpt_path=tmp_path / "1-end.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": None}, "asynchronous needs federation.devices"),
        ({"devices": Devices(speeds=GivenSpeeds([1.0]), deadline=9.0)}, "leave devices.deadline"),
        (
            {"asynchronous": FedBuff(concurrency=7)},
            "at most the number of clients, 6, got 7 and 10",
        ),
    ],
)
def test_refuses(settings, message):
    rule = FedBuff(concurrency=2, buffer_size=2)
    with pytest.raises(ConfigurationError, match=message):
        run(**{"devices": EQUAL, "asynchronous": rule, "local_steps": 1, **settings})


class NewMasks(Callback):
    """Sets other masks at the start of a round."""

    def __init__(self, at):
        self.at = at

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.at:
            trainer.optimizers[0].set_masks(some_masks(module, seed=self.at))


def test_masks_may_be_found_at_the_start_and_not_change_later():
    def fit(at):
        module = Masked(scheduler=False)
        before = copy.deepcopy(module)
        options = {"asynchronous": FedBuff(concurrency=4, buffer_size=2), "local_steps": 2}
        federated(module, NewMasks(at), devices=UNEQUAL, **options)
        return module, before

    module, before = fit(0)
    after = dict(module.named_parameters())
    for name, mask in some_masks(before, seed=0).items():
        old = dict(before.named_parameters())[name]
        assert torch.equal(after[name][~mask], old[~mask])
        assert not torch.equal(after[name][mask], old[mask])
    with pytest.raises(ConfigurationError, match="masks that change during the run"):
        fit(2)
