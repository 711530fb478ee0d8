"""A visit leaves nothing behind: whatever the module is, however the visit ends."""

import random
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from strange import TABLE
from strange.plain_loop import new_module
from strange.rows import Source
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from toys import Given, ToyModule, toy_data, toy_trainer, validating_trainer

from fl_lightning import ClientEvaluation, FederatedDataModule, Federation
from fl_lightning.client.local_step import loss_of
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.state.attributes import Attributes
from fl_lightning.core.metrics import metrics_of
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.visits.client_visits import evaluate_clients, measured_losses
from fl_lightning.federation.visits.visiting import visiting

ROWS = {row.name: row for row in TABLE if row.refused is None}
# what rows of other families are odd about is their loss or their data, which a visit passes on
FAMILIES = ("client_state", "own_draws")
OTHERS = ("CounterInABuffer", "CounterInASubmodule", "DictionaryOfLosses", "ForwardHookThatCounts",
          "HookAtEveryStep", "OptimizerPostHook", "Outputs", "StateInAClosure", "StateInAnObject")  # fmt: skip


def params():
    """Return names of rows, marked as slow but for those that visits care about."""
    for name, row in ROWS.items():
        is_fast = row.make.__module__.split(".")[-1] in FAMILIES or name in OTHERS
        yield pytest.param(name, marks=[] if is_fast and not row.is_slow else pytest.mark.slow)


def test_rows_that_visits_care_about_are_there():
    assert set(OTHERS) <= set(ROWS)


class Counted(ToyModule):
    """Has dropout, batch norm and torchmetrics objects, of which two share their states."""

    def __init__(self):
        super().__init__(dropout=0.3, batch_norm=True)
        self.right = MulticlassAccuracy(3)
        both = {"macro": MulticlassF1Score(3), "micro": MulticlassF1Score(3, average="micro")}
        self.f1 = MetricCollection(both)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.right(logits, batch[1])
        self.f1.update(logits, batch[1])
        self.log("train/right", self.right)
        self.log_dict(self.f1)
        return F.cross_entropy(logits, batch[1])


class Stop(Exception):
    """Ends a visit."""


class State:
    """What a module and its surroundings are at one moment, to be compared."""

    def __init__(self, module):
        self.tensors = {
            f"{path}.{name}": (tensor, tensor.detach().clone())
            for path, part in module.named_modules()
            for name, tensor in (part._parameters | part._buffers).items()
            if tensor is not None
        }
        params = dict(module.named_parameters())
        self.gradients = {
            name: (p.grad, p.grad.clone()) for name, p in params.items() if p.grad is not None
        }
        self.trains = {name: p.requires_grad for name, p in params.items()}
        self.modes = {name: part.training for name, part in module.named_modules()}
        self.metrics = [str(metric.metric_state) for metric in metrics_of(module)]
        self.apart = [metric.distributed_available_fn for metric in metrics_of(module)]
        self.log = vars(module).get("log")
        self.precision = (
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        self.generators = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
        self.python = Attributes(module, ignore=NOT_THE_USERS)

    def assert_is(self, module):
        """Fail where something differs now."""
        now = State(module)
        for before, after in ((self.tensors, now.tensors), (self.gradients, now.gradients)):
            assert before.keys() == after.keys()
            for name, (tensor, numbers) in before.items():
                assert after[name][0] is tensor, name
                torch.testing.assert_close(tensor.detach(), numbers, rtol=0, atol=0, equal_nan=True)
        for name in ("trains", "modes", "metrics", "apart", "log", "precision"):
            assert getattr(now, name) == getattr(self, name), name
        assert torch.equal(now.generators[0], self.generators[0])
        assert now.generators[1:] == self.generators[1:]
        assert self.python.changes() == []


def batches_of(trainer, client=1):
    data = trainer.datamodule
    parts = data.clients[client].split(data.batch_size)
    return ((data.train_batch(part), len(part)) for part in parts)


def take_steps(trainer, visit, *, after=100):
    """Compute gradients on a client's batches, draw, and end after some steps."""
    for number, output in enumerate(visit.steps(batches_of(trainer))):
        loss = loss_of(output) if trainer.lightning_module.automatic_optimization else None
        if loss is not None and loss.requires_grad:
            loss.backward()
        torch.rand(1), random.random(), np.random.rand()
        if number == after:
            raise Stop


def plainly(trainer):
    with visiting(trainer, mode="train") as visit:
        take_steps(trainer, visit)


def broken_off(trainer):
    with pytest.raises(Stop), visiting(trainer, mode="train") as visit:
        take_steps(trainer, visit, after=0)


def in_inference_mode(trainer):
    # a step may need gradients, so what it raises is not looked at
    with torch.inference_mode():
        before = State(trainer.lightning_module)
        with suppress(RuntimeError), visiting(trainer, mode="eval") as visit:
            take_steps(trainer, visit)
        before.assert_is(trainer.lightning_module)


def training_in_inference_mode(trainer):
    with (
        torch.inference_mode(),
        torch.inference_mode(False),
        torch.enable_grad(),
        visiting(trainer, mode="train") as visit,
    ):
        take_steps(trainer, visit)


def nested(trainer):
    module = trainer.lightning_module
    with visiting(trainer, mode="eval") as visit:
        take_steps(trainer, visit)
        before = State(module)
        with suppress(Stop), visiting(trainer, mode="train") as inner:
            assert vars(module)["log"] == inner.logs.log
            take_steps(trainer, inner, after=0)
        before.assert_is(module)
        take_steps(trainer, visit)


VISITS = (plainly, broken_off, in_inference_mode, training_in_inference_mode, nested)


class Visits(Callback):
    """Visits the module before and after a round, and looks whether all is as it was."""

    def __init__(self):
        super().__init__()
        self.num_visits = 0

    def visit_in_every_way(self, trainer, module):
        for visit in VISITS:
            before = State(module)
            visit(trainer)
            before.assert_is(module)
            self.num_visits += 1

    def on_train_epoch_start(self, trainer, module):
        module.on_train_epoch_start()  # which comes after callbacks'
        [*module.modules()][-1].eval()  # some part has a mode of its own
        self.visit_in_every_way(trainer, module)

    def on_train_epoch_end(self, trainer, module):
        for param in module.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        self.visit_in_every_way(trainer, module)


def fit(module, data, **options):
    visits = Visits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old forms, which are on purpose
        federation = Federation(engine="sequential", seed=0)
        trainer = toy_trainer(federation, visits, max_epochs=1, **options)
        trainer.fit(module, datamodule=data)
    assert visits.num_visits == 2 * len(VISITS)
    return trainer


@pytest.mark.parametrize("name", [*params()])
def test_nothing_is_left_of_a_visit(name):
    row = ROWS[name]
    data = FederatedDataModule(
        Source(row), num_clients=len(row.shards), partition=Given(row.shards), seed=0
    )
    fit(new_module(row), data, **row.trainer)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_nothing_is_left_with_metrics_in_any_precision(precision):
    fit(Counted(), toy_data(drop_last=True), precision=precision)


@pytest.mark.filterwarnings("ignore:You have overridden .on_after_batch_transfer")
def test_steps_are_those_of_lightning():
    """Batches pass the hooks, and the step alone runs under the precision."""

    class Doubles(Counted):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert batch[0].dtype == torch.float64  # a float32 one came out of the data set
            seen.append(torch.get_default_dtype())
            return 2 * batch[0], batch[1]

        def training_step(self, batch):  # takes no index
            seen.append(torch.get_default_dtype())
            return self.net(batch[0]).square().mean()

    seen, module = [], Doubles()
    trainer = toy_trainer(Federation(engine="sequential"), max_epochs=1, precision="64-true")
    trainer.fit(module, datamodule=toy_data(drop_last=True, batch_size=3))
    seen.clear()
    with torch.no_grad(), visiting(trainer, mode="eval") as visit:
        found = [(float(loss), visit.size) for loss in visit.steps(batches_of(trainer))]
        for (loss, size), ((x, _), _) in zip(found, batches_of(trainer), strict=True):
            assert loss == float(module.net(2 * x.double()).square().mean())
            assert size == len(x)
        assert seen == [torch.float32, torch.float64] * 2


def test_logs_are_those_of_the_visit():
    module = Counted()
    trainer = fit(module, toy_data(drop_last=True))
    outer = LogCollector()
    with outer.listening_to(module), visiting(trainer) as visit:
        take_steps(trainer, visit)
        assert visit.logs.metrics.keys() == {"train/right", "macro", "micro"}
        assert outer.metrics == {}


def test_what_is_not_collected_is_forgotten():
    trainer, logs = fit(ToyModule(), toy_data()), LogCollector()
    with visiting(trainer, logs=logs) as visit:
        take_steps(trainer, visit)
        assert logs.collect().keys() == {"train/accuracy"}
        take_steps(trainer, visit)
    assert logs.collect() == {}


def test_metrics_exchange_nothing_between_processes():
    """One process may visit while the others do not."""
    module = Counted()
    trainer = fit(module, toy_data(drop_last=True))
    for metric in metrics_of(module):
        metric.distributed_available_fn = lambda: True
    with visiting(trainer):
        assert not any(metric.distributed_available_fn() for metric in metrics_of(module))
    assert all(metric.distributed_available_fn() for metric in metrics_of(module))


def test_in_place_weights_stay_as_steps_made_them():
    module = Counted()
    trainer = fit(module, toy_data(drop_last=True))
    mode, before = module.training, State(module)
    with visiting(trainer, mode="train", in_place=True) as visit:
        take_steps(trainer, visit)
        with torch.no_grad():
            module.net[0].weight.zero_()
    assert module.net[0].weight.count_nonzero() == 0
    assert int(module.net[1].num_batches_tracked) > 0
    assert module.training == mode
    for name, (gradient, _) in before.gradients.items():
        assert module.get_parameter(name).grad is gradient


def test_metrics_can_be_trained_after_a_visit_in_inference_mode():
    """Tensors that are made in inference mode may not be written outside it."""
    module = Counted()
    trainer = fit(module, toy_data(drop_last=True))
    with torch.inference_mode(), visiting(trainer, mode="eval") as visit:
        take_steps(trainer, visit)
    for metric in metrics_of(module):
        for state in metric.metric_state.values():
            assert not state.is_inference()


class Gathers(ToyModule):
    """Keeps the losses of a validation until its end, as Lightning's documentation has it."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def validation_step(self, batch, batch_idx):
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("val/third", 1 / 3, batch_size=len(batch[1]))

    def on_validation_epoch_end(self):
        self.log("val/batches", float(len(self.losses)))
        self.losses.clear()


def test_clients_are_no_part_of_the_modules_own_validation():
    module, evaluation = Gathers(), ClientEvaluation(every_n_rounds=1)
    trainer = validating_trainer(Federation(seed=0), evaluation, max_epochs=2)
    trainer.fit(module, datamodule=toy_data(client_val_fraction=0.3))
    assert trainer.callback_metrics["val/batches"] == 1  # all 60 examples
    assert module.losses == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_numbers_that_python_computed_keep_their_digits(precision):
    module, data = Gathers(), toy_data(client_val_fraction=0.3)
    trainer = toy_trainer(Federation(seed=0), max_epochs=1, precision=precision)
    trainer.fit(module, datamodule=data)
    found = evaluate_clients(trainer, data, "validation")
    thirds = [float(values["val/third"]) for values in found.values()]
    assert thirds == pytest.approx([1 / 3] * len(found), rel=1e-6)


def test_what_a_step_counts_does_not_know_that_losses_were_measured():
    row = ROWS["PythonCounter"]
    data = FederatedDataModule(
        Source(row), num_clients=len(row.shards), partition=Given(row.shards), seed=0
    )
    module = new_module(row)
    trainer = fit(module, data)
    count = module.count
    assert len(measured_losses(trainer, np.arange(4), None, seed=0)) == 4
    assert module.count == count
