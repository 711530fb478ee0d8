"""Local steps as a module means them: schedules, numbers of batches, the step itself."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader
from toys import Notes, ToyModule, federated, toy, toy_data, toy_trainer, weights

from fl_lightning import (
    ConfigurationError,
    Federation,
    FineTuned,
    NormalisedMean,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client.devices import Devices, LogNormalSpeeds
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.cohorts.weighted_cohorts import PowerOfChoiceCohort
from fl_lightning.data.partitions.partition import DirichletSizes
from fl_lightning.data.shards import local_order
from fl_lightning.federation import client_id, local_step
from fl_lightning.server.staleness import FedBuff

WARM = 40  # local steps until the full rate
LAMBDA = torch.optim.lr_scheduler.LambdaLR
SCHEDULES = {  # of an optimizer, over a number of local steps
    "warm-up": lambda o, total: LAMBDA(o, lambda step: min(1.0, (step + 1) / WARM)),
    "chained": lambda o, total: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "one cycle": lambda o, total: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.2, total_steps=total, cycle_momentum=False
    ),
}


class Warming(ToyModule):
    """A warm-up over local steps, noted step by step; chained, and by groups of parameters."""

    def __init__(self, kind="warm-up", frequency=1):
        super().__init__(momentum=0.5)
        self.kind, self.frequency, self.notes = kind, frequency, Notes()

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters()},
            {"params": self.net[4].parameters(), "lr": 0.4},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.5)
        self.total = self.trainer.estimated_stepping_batches
        schedule = SCHEDULES[self.kind](optimizer, self.total)
        config = {"scheduler": schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Noting(Warming):
    def training_step(self, batch, batch_idx):
        rates = [g["lr"] for g in self.optimizers().param_groups]
        assert rates == self.lr_schedulers().get_last_lr()
        self.notes.add((self.current_epoch, client_id(self), int(local_step(self)), *rates))
        return super().training_step(batch, batch_idx)


def fit(module, *callbacks, data=None, max_epochs=3, trainer=(), **options):
    trainer, options = {"max_epochs": max_epochs, **dict(trainer)}, {"local_epochs": 2} | options
    return federated(module, *callbacks, data=data, trainer=trainer, seed=0, **options).trainer


def planned(data=None, epochs=2, size=8):
    data = data or toy_data()
    data.setup("fit")
    return int(epochs * np.ceil(data.clients.num_examples.max() / size))


def rates_by_hand(kind, total):
    """Return the two groups' rates of every local step of the run."""
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.4}], lr=0.2)
    schedule, rates = SCHEDULES[kind](optimizer, total), []
    for _ in range(total):
        rates.append(tuple(g["lr"] for g in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("kind", ["warm-up", "chained", "one cycle"])
def test_a_schedule_by_steps_counts_local_steps(kind):
    """A client of round r begins at N r, with N the steps of the client that takes the most."""
    module, num_steps = Noting(kind), planned()
    trainer = fit(module, cohort=UniformCohort(size=4))
    assert module.total == 3 * num_steps
    expected = rates_by_hand(kind, 3 * num_steps)
    notes = module.notes.read()
    assert {round_ for round_, *_ in notes} == {0, 1, 2}
    assert len({client for _, client, *_ in notes}) > 3
    before = None
    for round_, client, step, *rates in notes:
        step_in_round = 0 if before is None or before[:2] != (round_, client) else before[2] + 1
        assert step == round_ * num_steps + step_in_round
        assert rates == pytest.approx(expected[step], rel=1e-12)
        before = (round_, client, step_in_round)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3 * num_steps


def assert_slots_agree(make, caplog, **options):
    ends = []
    for engine in ("sequential", "slots"):
        data, module = toy_data(dtype=torch.float64), toy(make)
        fit(module, engine=engine, trainer={"precision": "64-true"}, data=data, **options)
        ends.append(weights(module))
    assert "slots, as asked for" in caplog.text
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_slots_take_the_rate_of_the_only_step_of_a_round(caplog):
    """Of several steps: `test_every_way`."""
    assert_slots_agree(partial(Warming, "chained"), caplog, local_epochs=None, local_steps=1)


class CyclesMomentum(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def test_momentum_that_changes_from_step_to_step_is_for_one_after_the_other():
    with pytest.warns(UserWarning, match="a schedule changes momentum from step to step"):
        fit(CyclesMomentum(), engine="slots")


def test_an_asynchronous_client_has_the_steps_of_the_version_that_it_began_from():
    module, num_steps = Noting(), planned()
    trainer = fit(
        module,
        asynchronous=FedBuff(concurrency=4, buffer_size=2),
        devices=Devices(speeds=LogNormalSpeeds(sigma=1.0)),
        max_epochs=6,
    )
    [federation] = [each for each in trainer.callbacks if isinstance(each, Federation)]
    versions = [federation._calendar.arrivals.step(number).versions for number in range(6)]
    assert any(version < n for n, began in enumerate(versions) for version in began.values())
    notes = module.notes.read()
    for round_, _, step, rate, _ in notes:
        assert rate == pytest.approx(0.2 * min(1.0, (step + 1) / WARM))
        assert step // num_steps == round_
    began = {(client, version) for each in versions for client, version in each.items()}
    assert {(client, round_) for round_, client, *_ in notes} == began


class PlateauBySteps(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        config = {"scheduler": plateau, "interval": "step", "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize(
    ("module", "options", "match"),
    [
        (PlateauBySteps, {}, "set interval to 'epoch'"),
        (
            partial(Warming, frequency=3),  # which Lightning counts by an epoch's batches
            {},
            "interval 'step' and frequency 3 counts .*: set frequency to 1",
        ),
        (
            Warming,
            {"correction": Scaffold()},
            "Scaffold .* changes it from step to step: set Scaffold's option",
        ),
        (
            Warming,
            {"aggregator": NormalisedMean()},
            "NormalisedMean divides .* changes it from step to step: use Mean",
        ),
    ],
)
def test_what_needs_one_rate_a_round_refuses_schedules_by_steps(module, options, match):
    with pytest.raises(ConfigurationError, match=match):
        fit(module(), **options)


class Asks(ToyModule):
    """Asks its Trainer how many batches there are."""

    def __init__(self):
        super().__init__()
        self.notes = Notes()

    def training_step(self, batch, batch_idx):
        told = self.trainer.num_training_batches, self.trainer.is_last_batch
        self.notes.add((client_id(self), batch_idx, *told))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_told_its_clients_number_of_batches(accumulate):
    module, data, trainer = Asks(), toy_data(), {"accumulate_grad_batches": accumulate}
    made = fit(module, data=data, max_epochs=1, trainer=trainer)
    notes = module.notes.read()
    for client, index, total, is_last in notes:
        expected = 2 * math.ceil(data.clients.num_examples[client] / 8)
        assert (total, is_last) == (expected, index == expected - 1)
    assert len({total for _, _, total, _ in notes}) > 1
    assert (type(made).__name__, made.accumulate_grad_batches) == ("Trainer", accumulate)
    assert not hasattr(made, "local_counts")


class Accumulating(ToyModule):
    """Notes what it is told of batches, and what is planned."""

    def __init__(self):
        super().__init__(scheduler=False)
        self.begun, self.ended = Notes(), Notes()

    def training_step(self, batch, batch_idx):
        self.begun.add(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.add(batch_idx)

    def configure_optimizers(self):
        trainer = self.trainer
        self.planned = trainer.estimated_stepping_batches, trainer.num_training_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("local", [{"local_epochs": 2}, {"local_epochs": None, "local_steps": 6}])
def test_accumulated_steps_end_at_an_epochs_last_batch_as_in_central_training(local):
    module, central = Accumulating(), ToyModule(scheduler=False)
    central.load_state_dict(module.state_dict())
    data = toy_data(1, num_examples=38, dtype=torch.float64)
    options = {"precision": "64-true", "accumulate_grad_batches": 2}
    fit(module, data=data, max_epochs=1, trainer=options, **local)
    order, sizes = local_order(
        data.clients[0], 8, lambda: torch_generator(0, "shuffle", 0, 0), num_epochs=2
    )
    batches = iter(order.split(sizes))

    class FiveAnEpoch:
        def __len__(self):
            return 5

        def __iter__(self):
            return (next(batches).tolist() for _ in range(5))

    seed_everything(0, verbose=False)
    loader = DataLoader(data.train_dataset, batch_sampler=FiveAnEpoch())
    toy_trainer(max_epochs=2, **options).fit(central, loader, DataLoader(data.train_dataset))
    torch.testing.assert_close(weights(module), weights(central), rtol=1e-12, atol=1e-14)
    assert module.planned == (6, 10)
    assert module.begun.read() == module.ended.read() == list(range(10))


class AsksAnywhere(ToyModule):
    """Notes who it is, wherever its training step is taken."""

    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.ones(()))  # which is why first steps are rehearsed
        self.notes = Notes()

    def training_step(self, batch, batch_idx):
        told = self.trainer.num_training_batches, self.trainer.is_last_batch, int(local_step(self))
        own = self.net[4].weight.requires_grad and not self.net[0].weight.requires_grad
        self.notes.add((self.training, own, client_id(self), len(batch[0]), batch_idx, *told))
        return super().training_step(batch, batch_idx)


def turns(module):
    """Return the turns of clients, each with what was noted in it and (client, whether it trains)."""
    found = []
    for is_training, own, client, size, index, *told in module.notes.read():
        if index == 0:
            found.append(((client, is_training, own), []))
        found[-1][1].append((size, *told))
    return found


def test_fresh_losses_are_of_a_client():
    module, data = AsksAnywhere(), toy_data()
    cohort = PowerOfChoiceCohort(size=2, num_candidates=6, loss_batches=2)
    fit(module, data=data, max_epochs=2, cohort=cohort, engine="sequential")
    measured = [turn for turn in turns(module) if not turn[0][1]]
    assert [client for (client, *_), _ in measured] == [*range(6)] * 2
    for number, ((client, *_), noted) in enumerate(measured):
        count = min(2, math.ceil(data.clients.num_examples[client] / 8))
        first = planned() * (number // 6)
        assert [told for _, *told in noted] == [
            [count, index == count - 1, first + index] for index in range(count)
        ]


def test_steps_are_rehearsed_as_a_client():
    module, data = AsksAnywhere(), toy_data()
    fit(module, data=data, max_epochs=1, engine="sequential")
    (client, *_), noted = turns(module)[0]
    count = 2 * math.ceil(data.clients.num_examples[0] / 8)
    assert client == 0
    assert [told for _, *told in noted] == [[count, i == count - 1, i] for i in range(2)]


def test_the_gradient_of_a_shard_is_a_clients_and_counts_its_own_batches():
    module, data = AsksAnywhere(), toy_data()
    correction = Scaffold(option="I")
    fit(module, data=data, max_epochs=1, correction=correction, engine="sequential")
    once = [math.ceil(size / 8) for size in data.clients.num_examples]
    noted = [told for turn in turns(module)[1:] for _, *told in turn[1]]  # after the rehearsal
    expected = [
        [batches, index == batches - 1, index]
        for count in once
        for batches in (2 * count, count)  # of two epochs, and of the gradient
        for index in range(batches)
    ]
    assert noted == expected


@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_of_a_clients_own_part_have_batches_of_their_own(epochs):
    module, data = AsksAnywhere(), toy_data()
    personal = Personal(["net.4.*"], own_epochs=epochs)
    fit(module, data=data, max_epochs=1, personal=personal)
    own = [turn for turn in turns(module) if turn[0][2]]
    assert [client for (client, *_), _ in own] == [*range(6)]
    for (client, *_), noted in own:
        count = epochs * math.ceil(data.clients.num_examples[client] / 8)
        assert [told for _, *told in noted] == [[count, i == count - 1, i] for i in range(count)]


def test_fine_tuning_is_a_clients_also_outside_of_a_fit():
    module, data = AsksAnywhere(), toy_data()
    made = fit(module, data=data, max_epochs=1, personal=FineTuned(local_steps=3))
    turns(module)
    [federation] = (c for c in made.callbacks if isinstance(c, Federation))
    models = federation.personal_models(made)
    for client in (4, 1):
        with models.of(client):
            [((told, *_), noted)] = turns(module)
            assert told == client
            assert [each for _, *each in noted] == [[3, i == 2, i] for i in range(3)]
    assert client_id(module) is None
    assert not hasattr(made, "local_counts")


def test_steps_that_ask_for_their_clients_batches_are_taken_one_after_the_other():
    with pytest.warns(UserWarning, match="training_step reads trainer.num_training_batches"):
        fit(Asks(), engine="slots")


class Annealed(ToyModule):
    """A loss that grows with the local step of the run."""

    def __init__(self, read=local_step):
        super().__init__()
        self.read = read

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (0.1 * self.read(self) + 1)


def test_the_local_step_is_known_in_slots(caplog):
    assert_slots_agree(Annealed, caplog)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_that_global_step_counts_rounds_is_said_once_if_a_step_reads_it(engine, caplog):
    class Reads(Callback):
        def on_train_batch_end(self, trainer, *_):
            assert trainer.global_step <= 3

    fit(ToyModule(), Reads(), engine=engine)
    assert "global_step" not in caplog.text
    fit(Annealed(lambda module: module.global_step), engine=engine)
    assert caplog.text.count("reads global_step while a client trains; it counts rounds") == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it
def test_a_compiled_module_is_compiled_once_however_many_steps_log():
    counts = []
    for rounds in (1, 3):
        torch._dynamo.reset()
        counter = CompileCounter()
        data = toy_data(3, num_examples=72, partition=DirichletSizes(alpha=1e6))  # 3 full batches
        fit(
            torch.compile(ToyModule(scheduler=False), backend=counter),
            data=data,
            max_epochs=rounds,
            engine="sequential",
        )
        counts.append(counter.frame_count)
    assert counts == [1, 1]


class FromZero(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        warm_up = LAMBDA(optimizer, lambda step: min(1.0, step / WARM))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def test_a_warm_up_by_steps_from_zero_is_no_idle_round(caplog):
    module = FromZero()
    before = weights(module)
    fit(module, max_epochs=1)
    assert not torch.equal(weights(module), before)
    assert "learning rate is 0" not in caplog.text
