"""While slots run, clients drawn by seed are trained both ways; what differs stops the run."""

import logging
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from quadratics import ByOwner
from torch import nn
from torch.nn import functional as F
from toys import SaveEverywhere, ToyModule, toy, toy_data, toy_trainer, weights

from fl_lightning import (
    ClientFailure,
    ConfigurationError,
    FederatedDataModule,
    Federation,
    FedProx,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import EnginesDiffer
from fl_lightning.core.seeds import uniform_numbers
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.data import Digits
from fl_lightning.federation.clients.fit_clients import FitClients
from fl_lightning.federation.clients.in_slots import SlotEngine
from fl_lightning.federation.clients.spot_check import (
    Rounding,
    SpotCheck,
    TrainedClient,
    differences,
    drawn,
    nudged,
)
from fl_lightning.server import FedBuff
from fl_lightning.updates import QSGD, TopK


def run(module, *callbacks, data=None, ckpt=None, max_epochs=3, trainer=None, **block):
    options = {"local_epochs": 2, "slots": 3, "seed": 0, "engine": "slots", "spot_check": 1.0}
    federation = Federation(**options | block)
    fit = toy_trainer(federation, *callbacks, max_epochs=max_epochs, **(trainer or {}))
    fit.fit(module, datamodule=data or toy_data(), ckpt_path=ckpt)
    return fit


class Looked(list):
    def __init__(self):
        super().__init__()
        self.again = []


@pytest.fixture
def checked(monkeypatch):
    """Return which clients were looked at, as (round, client), when the run is over.

    ``again`` has an entry for everyone who was trained again, at a look or at a closer one.
    """
    looked, look, train = Looked(), SpotCheck.look, FitClients._train_alone

    def train_alone(self, work, model, *, is_corrected=True):
        if is_corrected:  # else it is a trial
            looked.again.append(work.client_id)
        return train(self, work, model, is_corrected=is_corrected)

    def note(self, work, found, start):
        looked.append((work.round_index, work.client_id))
        look(self, work, found, start)

    monkeypatch.setattr(FitClients, "_train_alone", train_alone)
    monkeypatch.setattr(SpotCheck, "look", note)
    return looked


def spoil(monkeypatch, change, since=1):
    """From a round on, have slots give something else: their groups as ``change`` makes them."""
    right = SlotEngine.train

    def train(self, model, work, *args, **options):
        for group in right(self, model, work, *args, **options):
            is_spoilt = work[0].round_index >= since if len(work) else False
            yield change(group) if is_spoilt else group

    monkeypatch.setattr(SlotEngine, "train", train)


def longer(group):
    group.deltas.mul_(1.01)
    return group


class Rounds(Callback):
    """Keeps the model after every round."""

    def __init__(self):
        self.ends = []

    def on_train_epoch_end(self, trainer, module):
        self.ends.append(weights(module))


class TestWhatDiffersStopsTheRun:
    def test_with_client_round_size_and_remedy(self, monkeypatch):
        spoil(monkeypatch, longer)
        module, rounds = toy(), Rounds()
        with pytest.raises(EnginesDiffer) as caught:
            run(module, rounds)
        said = str(caught.value)
        assert f"round 2, client {caught.value.client_id}: " in said
        assert "its update from slots differs from sequential training by 1.0e-02" in said
        assert "Set federation.engine: sequential" in said
        # the round does not count: the model is that of the one before
        assert len(rounds.ends) == 1
        assert torch.equal(weights(module), rounds.ends[-1])

    @pytest.mark.parametrize(
        ("field", "name"),
        [("buffers", "buffers"), ("metrics", "logged train/loss"), ("deltas", "update")],
    )
    def test_whatever_it_is(self, monkeypatch, field, name):
        def change(group):
            value = getattr(group, field)
            (value["train/loss"] if field == "metrics" else value).mul_(0.99)
            return group

        spoil(monkeypatch, change)
        data = toy_data(batch_size=4, drop_last=True)
        with pytest.raises(
            EnginesDiffer, match=rf"round 2, client \d: its {name} from slots differs"
        ):
            run(toy(batch_norm=True), data=data)

    def test_one_coordinate_is_enough(self, monkeypatch):
        def change(group):
            group.deltas[:, 3] += 0.01 * group.deltas.norm(dim=1)
            return group

        spoil(monkeypatch, change)
        with pytest.raises(EnginesDiffer, match="round 2"):
            run(toy())

    def test_a_part_that_clients_keep(self, monkeypatch):
        kept = SlotEngine.kept.fget
        monkeypatch.setattr(
            SlotEngine, "kept", property(lambda self: {c: 1.1 * o for c, o in kept(self).items()})
        )
        monkeypatch.setattr("fl_lightning.federation.clients.trial.difference", lambda *_: None)
        with pytest.raises(EnginesDiffer, match="its personal part from slots differs"):
            run(toy(), personal=Personal(["net.4.*"]))

    def test_a_client_that_fails_in_slots_only(self, monkeypatch):
        def change(group):
            group.deltas[0] = torch.nan
            return group

        expected, module = toy(), toy()
        run(expected)
        spoil(monkeypatch, change)  # trains one after the other: its failure may be the slots' own
        trainer = run(module)
        assert trainer.current_epoch == 3
        torch.testing.assert_close(weights(module), weights(expected))

    def test_not_if_nobody_is_checked(self, monkeypatch):
        spoil(monkeypatch, longer)
        assert run(toy(), spot_check=0).current_epoch == 3

    def test_nothing_of_the_round_counts(self, monkeypatch):
        spoil(monkeypatch, longer)
        module, first = toy(Measured), toy(Measured)
        with pytest.raises(EnginesDiffer, match="round 2"):
            run(module, correction=Scaffold())
        [federation] = (c for c in module.trainer.callbacks if isinstance(c, Federation))
        assert federation.state_dict()["inside"]  # the round begins anew if the run is resumed
        once = run(first, correction=Scaffold(), max_epochs=1, spot_check=0).callbacks[0]
        assert torch.equal(weights(module), weights(first))
        pair = (f.state_dict()["memory"]["present"] for f in (federation, once))
        for one, other in zip(*pair, strict=True):
            assert one[:2] == other[:2]
            assert torch.equal(one[2], other[2])
        assert not module.metric.update_called

    def test_one_process_stops_all(self, monkeypatch):
        spoil(monkeypatch, longer)
        module = toy()
        with pytest.raises(EnginesDiffer, match=r"round 2, client \d: .*engine:\ssequential"):
            run(module, trainer={"devices": 2})

    def test_the_error_travels_between_processes(self):
        error = pickle.loads(pickle.dumps(EnginesDiffer(3, "client 3: no")))
        assert (type(error), error.client_id, str(error)) == (EnginesDiffer, 3, "client 3: no")


class Measured(ToyModule):
    """Logs a torchmetrics object, and numbers with the bar's own name for one of them."""

    def __init__(self, **options):
        super().__init__(dropout=0.3, **options)
        self.metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.metric(logits, batch[1])
        self.log("train/object", self.metric, prog_bar=True)
        self.total.update(loss.detach())
        self.log("train/total", self.total)
        self.log("train/double", 2 * loss, on_step=True, on_epoch=True)
        return loss


class Adapted(ToyModule):
    """Has a frozen part."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Images(ToyModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))


class Draws(Callback):
    """Keeps what the global generators would give next, at the end of every round."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        state = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.seen.append((float(torch.rand(())), np.random.rand(), random.random()))
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


def full_batches():
    return toy_data(batch_size=4, drop_last=True)


def augmented():
    return FederatedDataModule(Digits(augment=True, seed=0), num_clients=6, seed=0)


CASES = {
    "one step of Adam": (Adapted, {"local_epochs": None, "local_steps": 1}),
    "augmentation": (Images, {"data": augmented, "local_epochs": None, "local_steps": 3}),
    "torchmetrics, dropout, clipping": (Measured, {"trainer": {"gradient_clip_val": 0.2}}),
    "FedPer, Scaffold, download": (
        ToyModule,
        {
            "personal": Personal(["net.4.*"]),
            "correction": Scaffold(),
            "download": [QSGD(bits=4)],
            "updates": [TopK(0.5)],
        },
    ),
    "FedBN": (
        partial(ToyModule, batch_norm=True),
        {"personal": Personal(norms=True), "data": full_batches},
    ),
    "half": (
        ToyModule,
        {
            "correction": FedProx(mu=0.5),
            "trainer": {"precision": "bf16-mixed"},
            "data": full_batches,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_same_bits_with_checks(case, checked):
    kind, options = CASES[case]
    make = options.get("data", toy_data)
    ends, draws, logs = [], [], []
    for fraction in (1.0, 0.0):
        module, seen = toy(kind), Draws()
        block = options | {"data": make(), "spot_check": fraction, "cohort": UniformCohort(size=4)}
        block |= {"pad_batches": make is toy_data}
        trainer = run(module, seen, **block)
        federation = trainer.callbacks[0]
        assert federation.rounds.clients.engine.slots is not None
        ends.append((weights(module), federation.rounds.memory.state_dict()["present"]))
        draws.append(seen.seen)
        values = {k: float(v) for k, v in trainer.callback_metrics.items() if "seconds" not in k}
        logs.append((values, federation.rounds.clients.collector.prog_bar))
        if fraction:
            expected = checked.copy()
            assert len(checked.again) == len(checked)  # nobody needed a closer look
    # all clients, or those whose batches are full
    assert len(expected) == 3 * 4 if options.get("data") is not full_batches else len(expected) > 6
    assert checked == expected
    assert torch.equal(ends[0][0], ends[1][0])
    for one, other in zip(ends[0][1], ends[1][1], strict=True):
        assert one[:2] == other[:2]
        assert torch.equal(one[2], other[2])
    assert draws[0] == draws[1]
    assert logs[0] == logs[1]


def test_stale_starts_are_the_clients_own(checked):
    """A client that began two rounds ago is trained again from the model that it was sent."""
    ends = []
    for fraction in (1.0, 0.0):
        module = toy()
        rule = FedBuff(concurrency=4, buffer_size=2)
        devices = {"devices": Devices(speeds=LogNormalSpeeds(sigma=1.0)), "asynchronous": rule}
        run(module, max_epochs=5, spot_check=fraction, pad_batches=True, **devices)
        ends.append(weights(module))
    assert len(checked) == 5 * 2
    assert torch.equal(*ends)


class Unstable(ToyModule):
    """Trains at a rate at which rounding decides where it ends."""

    def __init__(self):
        super().__init__(lr=0.5, scheduler=False)
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def test_rounding_alone_is_no_reason_to_stop(checked):
    data = FederatedDataModule(Digits(seed=0), num_clients=4, seed=0)
    run(toy(Unstable), data=data, local_epochs=None, local_steps=60, max_epochs=1)
    assert len(checked) == 4
    assert len(checked.again) > len(checked)  # some were looked at more closely


class Fails(ToyModule):
    """Its client of the third class has no loss, however it trains."""

    def training_step(self, batch, batch_idx):
        added = torch.where(batch[1] == 2, torch.nan, 0.0).mean()
        return super().training_step(batch, batch_idx) + added


@pytest.mark.filterwarnings("ignore:skipped:UserWarning")
def test_clients_that_fail_both_ways_are_skipped(checked):
    data = toy_data(num_clients=3, partition=ByOwner())
    trainer = run(toy(Fails), data=data, on_client_failure="skip")
    assert trainer.callback_metrics["round/skipped"] == 1
    assert len(checked) == 3 * 2


class Centred(ToyModule):
    """Has a loss that is no mean over examples: clients without a full batch train in sequence."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.net(batch[0]).mean(0).square().sum()


class MeanAtFirst(ToyModule):
    """From the third round on its loss is a sum."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * len(batch[0]) if self.current_epoch >= 2 else loss


def test_a_loss_that_was_said_to_be_a_mean_is_held_to_it():
    with pytest.raises(EnginesDiffer, match=r"round 3, client .*federation\.pad_batches: false"):
        run(toy(MeanAtFirst), pad_batches=True)
    run(toy(MeanAtFirst))


class TestWhoIsChecked:
    def test_the_same_clients_in_every_run(self, checked):
        runs = []
        for _ in range(2):
            run(toy(), spot_check=0.5)
            runs.append(checked.copy())
            checked.clear()
        assert runs[0] == runs[1]
        assert 3 <= len(runs[0]) <= 15
        run(toy(), spot_check=0.5, seed=1)
        assert checked != runs[0]

    def test_the_same_after_resuming(self, tmp_path, checked):
        run(toy(), SaveEverywhere(tmp_path), spot_check=0.5)
        expected = [entry for entry in checked if entry[0] >= 2]
        checked.clear()
        run(toy(), spot_check=0.5, ckpt=tmp_path / "1-end.ckpt")
        assert checked == expected != []

    def test_as_many_as_the_rate_says(self):
        """10,000 clients in rounds: the count is binomial, within four standard deviations."""
        clients, rounds = np.meshgrid(np.arange(100), np.arange(100))
        for fraction in (0.0, 0.005, 0.1, 1.0):
            numbers = uniform_numbers(3, "spot check", rounds.ravel(), clients.ravel())
            spread = 4 * (10_000 * fraction * (1 - fraction)) ** 0.5
            assert abs((numbers < fraction).sum() - 10_000 * fraction) <= spread
        table = numbers.reshape(100, 100)  # neither clients nor rounds have luck of their own
        assert abs(table.mean(0) - 0.5).max() < 0.12
        assert abs(table.mean(1) - 0.5).max() < 0.12

    def test_whatever_the_company(self):
        work = [ClientWork(i, 1, torch.tensor([i]), [1], round_index=i % 3) for i in range(200)]
        together = [client.client_id for client in drawn(GroupWork.of(work), 0.2)]
        alone = [c.client_id for c in work if len(drawn(GroupWork.of([c]), 0.2))]
        assert together == alone != []
        assert set(together) < {c.client_id for c in drawn(GroupWork.of(work), 0.3)}

    def test_only_those_in_slots(self, checked):
        data = toy_data(batch_size=4)
        run(toy(Centred), data=data)
        full = {int(c) for c in np.flatnonzero(data.clients.num_examples >= 4)}
        assert {client for _, client in checked} == full != set()


class TestCost:
    @pytest.mark.parametrize(
        ("fraction", "words"),
        [
            (0.002, "one client in 500 is trained both ways as a check"),
            (1.0, "every client is trained both ways as a check"),
            (0.0, "none of them checked"),
        ],
    )
    def test_the_engines_line_says_it(self, caplog, fraction, words):
        with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
            run(toy(), spot_check=fraction, max_epochs=1)
        assert "engine: 3 slots, as asked for, " in caplog.text
        assert words in caplog.text


def trained(delta, buffers=(), own=(), own_start=(), **metrics):
    tensors = {name: torch.tensor(value) for name, value in metrics.items()}
    update = ClientUpdate(0, torch.tensor(delta), torch.tensor(buffers), 1, 1, tensors)
    return TrainedClient(update, torch.tensor(own), torch.tensor(own_start))


class TestDifferences:
    START = GlobalModel(torch.zeros(2), torch.tensor([1.0]))

    def test_by_hand(self):
        one = trained([3.0, 4.0], [3.0], [10.0], [9.0], accuracy=0.5)
        other = trained([3.0, 4.5], [3.5], [10.1], [9.0], accuracy=0.6)
        found = differences(one, other, self.START, num_seen=1000)
        expected = {"update": 0.5 / 5, "buffers": 0.5 / 2, "personal part": 0.1}
        # two of a thousand examples may lie on the edge between two classes
        expected["logged accuracy"] = (0.1 - 0.002) / 0.5
        assert found == pytest.approx(expected, rel=1e-5)
        assert not any(differences(one, one, self.START, 1).values())

    def test_what_is_missing_or_not_a_number(self):
        one = trained([1.0, 1.0], [1.0], loss=1.0, both=torch.nan)
        other = trained([1.0, 1.0], [1.0], more=1.0, both=torch.nan)
        found = differences(one, other, self.START, 10)
        assert {name for name, gap in found.items() if gap} == {"logged loss", "logged more"}
        assert found["logged more"] == float("inf")
        nan = trained([1.0, torch.nan], [1.0])
        assert differences(trained([1.0, 1.0], [1.0]), nan, self.START, 1)["update"] == float("inf")

    def test_a_nudge_is_one_rounding_up_or_down(self):
        torch.manual_seed(0)
        model = GlobalModel(torch.randn(1000, dtype=torch.float64), torch.zeros(1))
        one = nudged(model, None, 1e-6, seed=1)
        size = (model.params.square() + model.params.square().mean()).sqrt()
        ratio = (one.params - model.params) / size
        torch.testing.assert_close(ratio.abs(), torch.full_like(ratio, 1e-6), rtol=1e-6, atol=0)
        assert abs(ratio.sign().mean()) < 0.15
        assert torch.equal(one.params, nudged(model, None, 1e-6, seed=1).params)
        assert not torch.equal(one.params, nudged(model, None, 1e-6, seed=2).params)

    @pytest.mark.parametrize(
        ("precision", "dtype", "share"),
        [
            ("32-true", torch.float32, 1e-4),
            ("64-true", torch.float64, 1e-6),
            ("bf16-mixed", torch.float32, 0.1),
            ("32-true", torch.float16, 0.1),
        ],
    )
    def test_how_coarse_numbers_are(self, precision, dtype, share):
        frozen = nn.Linear(1, 1).to(dtype)
        assert Rounding.of(precision, nn.ModuleList([frozen])).share == share

    def test_coarse_products(self):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            assert Rounding.of("32-true", nn.Linear(1, 1)).share == 0.02
        finally:
            torch.set_float32_matmul_precision(before)


def test_a_failure_of_the_check_is_no_clients_failure():
    """``on_client_failure: skip`` does not pass over it."""
    assert not issubclass(EnginesDiffer, ClientFailure)
    assert issubclass(EnginesDiffer, ConfigurationError)
