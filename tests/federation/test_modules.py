"""Users' own modules: what works, with the same result, and what is refused."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import Ordered, ToyData, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import ConfigurationError, Federation, RoundFailure, UniformCohort
from fl_lightning.data.partitions.partition import DirichletSizes
from fl_lightning.federation.hooks import STEP_HOOKS
from fl_lightning.updates.message import bytes_down


def fit(module, *callbacks, data=None, federation=None, **options):
    seed_everything(0, verbose=False)
    federation = federation or Federation(cohort=UniformCohort(size=3), local_epochs=2, seed=0)
    trainer = toy_trainer(federation, *callbacks, **options)
    trainer.fit(module, datamodule=data or toy_data())
    return trainer, federation


class WithIdleHook(ToyModule):
    """An overridden hook that does nothing forces the full path."""

    def __init__(self, **options):
        super().__init__(**options)
        self.backwards = []

    def on_after_backward(self):
        self.backwards.append(True)


@pytest.mark.parametrize(
    ("precision", "clip"),
    [
        ("32-true", {"gradient_clip_val": 0.05}),
        ("64-true", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("bf16-mixed", {"gradient_clip_val": 0.05}),
        ("bf16-true", {}),
    ],
)
def test_lean_and_full_steps_agree_bit_for_bit(precision, clip):
    ends = []
    for kind in (ToyModule, WithIdleHook):
        seed_everything(0, verbose=False)
        module = kind(dropout=0.3)
        _, federation = fit(module, precision=precision, **clip)
        assert federation.rounds.clients.step.is_lean == (kind is ToyModule)
        ends.append(weights(module))
    assert torch.equal(*ends)
    assert module.backwards


def test_accumulated_batches_are_one_larger_batch():
    ends = []
    for batch_size, accumulate in ((16, 1), (8, 2)):
        seed_everything(0, verbose=False)
        module = ToyModule().double()
        data = toy_data(num_clients=1, num_examples=48, batch_size=batch_size, dtype=torch.float64)
        federation = Federation(local_epochs=1, seed=0)
        options = {"accumulate_grad_batches": accumulate, "precision": "64-true"}
        trainer, _ = fit(module, data=data, federation=federation, **options)
        assert trainer.accumulate_grad_batches == accumulate  # given back as it was
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_local_steps_count_optimizer_steps():
    module = WithIdleHook()
    federation = Federation(cohort=UniformCohort(size=2), local_steps=5, seed=0)
    data = toy_data(2, num_examples=56, partition=DirichletSizes(alpha=1e6))  # 4 batches each
    fit(module, data=data, federation=federation, accumulate_grad_batches=3, max_epochs=1)
    assert len(module.backwards) == 2 * (3 + 1 + 3 + 1 + 3)


def test_parameter_groups_and_schedules_by_epochs_advance_per_round():
    class Groups(ToyModule):
        def configure_optimizers(self):
            groups = [
                {"params": self.net[0].parameters(), "lr": 0.1},
                {"params": self.net[4].parameters(), "lr": 0.0},
            ]
            optimizer = torch.optim.SGD(groups)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [scheduler]

    module = Groups()
    start = {n: p.clone() for n, p in module.state_dict().items()}
    trainer, _ = fit(module, max_epochs=3)
    assert [g["lr"] for g in trainer.optimizers[0].param_groups] == [0.0125, 0.0]
    assert torch.equal(module.net[4].weight, start["net.4.weight"])
    assert not torch.equal(module.net[0].weight, start["net.0.weight"])


class Reduces(ToyModule):
    """Logs how many examples a batch has, in all ways; the last batch of a client may be smaller."""

    def training_step(self, batch, batch_idx):
        for reduction in ("sum", "max", "min", "mean"):
            self.log(f"train/{reduction}", float(len(batch[0])), reduce_fx=reduction)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"devices": 2}], ids=["one", "two processes"])
def test_sums_and_extremes_are_those_over_all_clients(options):
    data, federation = toy_data(), Federation(local_epochs=1)
    trainer, _ = fit(Reduces(), data=data, federation=federation, max_epochs=1, **options)
    data.setup("fit")
    sizes = [n % 8 or 8 for n in data.clients.num_examples]
    metrics = {
        name: float(trainer.callback_metrics[f"train/{name}"]) for name in ("sum", "max", "min")
    }
    assert metrics == {"sum": 60.0, "max": 8.0, "min": float(min(sizes))}
    assert min(sizes) < trainer.callback_metrics["train/mean"] < 8


class WithMetrics(ToyModule):
    """Logs torchmetrics objects, as most modules do."""

    def __init__(self):
        super().__init__()
        options = {"task": "multiclass", "num_classes": 3}
        self.accuracy = torchmetrics.Accuracy(**options)
        self.f1 = torchmetrics.F1Score(average="macro", **options)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.f1.update(logits, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"train_f1": self.f1, "half": 0.5, "size": float(len(y))})
        self.seen.append((logits.detach().argmax(1), y))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_logged_values_and_torchmetrics_are_those_of_the_pooled_examples():
    module = WithMetrics()
    trainer, _ = fit(module, max_epochs=1)
    logits = torch.cat([p for p, _ in module.seen])
    labels = torch.cat([y for _, y in module.seen])
    logged = trainer.callback_metrics
    sizes = torch.tensor([float(len(y)) for _, y in module.seen])
    assert logged["train_acc_epoch"].item() == pytest.approx((logits == labels).float().mean())
    macro = torchmetrics.functional.f1_score(logits, labels, "multiclass", num_classes=3)
    per_class = torchmetrics.functional.f1_score(
        logits, labels, "multiclass", num_classes=3, average="macro"
    )
    assert logged["train_f1"].item() == pytest.approx(per_class.item())
    assert logged["train_f1"].item() != pytest.approx(macro.item(), abs=1e-6)
    assert logged["half"] == 0.5
    assert logged["size"].item() == pytest.approx((sizes**2).sum() / sizes.sum())


@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
def test_modules_see_local_batches_in_their_own_hooks():
    class Hooks(ToyModule):
        def __init__(self):
            super().__init__()
            self.calls = []

        def see(self, name, batch):
            self.calls.append(name)
            assert isinstance(batch, (tuple, list))
            assert batch[0].shape[1] == 4

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.see("before", batch)
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.see("after", batch)
            return [batch[0] + 1, batch[1]]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.see("transfer", batch)
            return batch

        def on_train_batch_start(self, batch, batch_idx):
            self.see("start", batch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["loss"].ndim == 0
            self.see("end", batch)

    module = Hooks()
    fit(module)
    assert set(module.calls) == {"before", "after", "transfer", "start", "end"}
    assert "on_after_batch_transfer" not in vars(module)
    assert "log" not in vars(module)


@pytest.mark.parametrize("hook", STEP_HOOKS)
def test_every_step_hook_of_the_module_is_called(hook):
    calls = []

    def overriding(self, *args, **kwargs):
        calls.append(hook)
        return getattr(super(kind, self), hook)(*args, **kwargs)

    kind = type("Overrides", (ToyModule,), {hook: overriding})
    fit(kind(), federation=Federation(local_steps=2), max_epochs=1)
    assert len(calls) == 6 * 2  # clients, local steps


def test_a_module_that_never_returns_a_loss_ends_the_first_round():
    class Silent(ToyModule):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(
        RoundFailure, match="round 1: no client returned a loss, and the model has not changed"
    ):
        fit(Silent(), federation=Federation(local_steps=2))


class ByTokens(ToyModule):
    """Logs means over tokens, of which some examples have many, and over examples of a class."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        counts = 1 + 99 * (y == 0)
        share = (x[:, 0] * counts).sum() / counts.sum()
        self.log("per_token", share, batch_size=int(counts.sum()))
        count = int((y == 0).sum())
        self.log("of_class_0", x[y == 0].sum() / max(count, 1), batch_size=count)
        return F.cross_entropy(self.net(x), y)


class ByBatches(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("per_batch", x.mean(), batch_size=1)
        return F.cross_entropy(self.net(x), y)


def test_a_logged_mean_is_weighted_by_its_batch_size_over_clients_as_in_one_place():
    """Weight 0 counts for nothing."""
    data = toy_data(3, batch_size=2)
    federation = Federation(local_epochs=1)
    trainer, _ = fit(ByTokens(), federation=federation, data=data, max_epochs=1)
    x, y = data.source.train.tensors
    counts = 1 + 99 * (y == 0)
    expected = (x[:, 0] * counts).sum() / counts.sum()
    torch.testing.assert_close(trainer.callback_metrics["per_token"], expected)
    of_class_0 = x[y == 0].sum() / (y == 0).sum()
    torch.testing.assert_close(trainer.callback_metrics["of_class_0"], of_class_0)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_a_logged_mean_over_batches_counts_all_batches_alike(engine):
    federation = Federation(local_epochs=1, engine=engine, spot_check=1.0)
    data = toy_data(3, num_examples=61, batch_size=4)
    trainer, _ = fit(ByBatches(), federation=federation, data=data, max_epochs=1)
    plan = federation.rounds.run.plan
    batches = [b for work in plan.of([0, 1, 2], [0] * 3) for b, _ in plan.batches(work)]
    assert len({len(x) for x, _ in batches}) > 1
    expected = torch.stack([x.mean() for x, _ in batches]).mean()
    torch.testing.assert_close(trainer.callback_metrics["per_batch"], expected)


class LogsTwice(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("twice", loss)
        self.log("twice", 3 * loss)
        return loss


@pytest.mark.filterwarnings("ignore:engine. sequential, not slots")
@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_a_name_logged_twice_in_a_step_is_the_mean_of_both(engine):
    federation = Federation(local_epochs=1, engine=engine)
    trainer, _ = fit(LogsTwice(), federation=federation, max_epochs=1)
    found = trainer.callback_metrics
    torch.testing.assert_close(found["twice"], 2 * found["train/loss"])


def test_a_torchmetrics_object_outside_of_the_module_is_refused():
    """A client that trained twice, for a trial, was counted twice in it."""

    class Outside(ToyModule):
        def __init__(self):
            super().__init__()
            self.kept = {"sum": torchmetrics.SumMetric()}

        def training_step(self, batch, batch_idx):
            self.kept["sum"].update(1.0)
            self.log("sum", self.kept["sum"])
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        ConfigurationError, match=r"self.log\('sum', …\).*must be a part of the module"
    ):
        fit(Outside(), max_epochs=1)


def test_a_name_that_marks_a_weight_cannot_be_logged():
    class Marked(ToyModule):
        def training_step(self, batch, batch_idx):
            self.log("bits per example", 1.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match="must not end in ' per example'"):
        fit(Marked(), max_epochs=1)


def test_frozen_parameters_neither_move_nor_travel():
    module = ToyModule()
    module.net[0].requires_grad_(False)
    start = module.net[0].weight.clone()
    _, federation = fit(module)
    assert torch.equal(module.net[0].weight, start)
    assert federation.rounds.record.total_bytes_down == 3 * bytes_down(
        torch.zeros(27), torch.zeros(0)
    )


class Teacher(ToyModule):
    """Follows itself by an exponential moving average of PyTorch's."""

    def __init__(self, count=1):
        super().__init__(scheduler=False, momentum=0)
        self.teacher = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.teacher.requires_grad_(False).n_averaged.fill_(count)

    def on_train_batch_end(self, *_):
        self.teacher.update_parameters(self.net)


class Afterwards(Teacher):
    """Averages the global model only."""

    on_train_batch_end = ToyModule.on_train_batch_end

    def on_train_epoch_end(self):
        self.teacher.update_parameters(self.net)


def test_an_average_between_rounds_may_count():
    module = Afterwards(count=0)
    fit(module, max_epochs=2)
    assert int(module.teacher.n_averaged) == 2


def test_an_average_that_needs_its_count_is_refused():
    with pytest.raises(ConfigurationError, match="counts its updates in an integer buffer"):
        fit(Teacher(count=0), max_epochs=1)


def test_fp16_scaler_starts_every_client_from_the_same_scale():
    """Clients in either order give the same model, though fp16 overflows on the way."""
    ends = []
    for order in (1, -1):
        seed_everything(0, verbose=False)
        module = ToyModule()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        federation = Federation(cohort=Ordered(order), local_epochs=3, seed=0)
        fit(module, federation=federation, plugins=[plugin])
        assert scaler.get_scale() < 2.0**30
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


class BadLoss(ToyModule):
    def training_step(self, batch, batch_idx):
        return "loss"


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (BadLoss(), None, "must return a loss tensor"),
        (ToyModule(), GradientAccumulationScheduler({0: 2}), "GradientAccumulationScheduler"),
        (ToyModule(), StochasticWeightAveraging(1e-2), "StochasticWeightAveraging"),
        (ToyModule(), LearningRateFinder(), "LearningRateFinder"),
        (
            ToyModule(),
            EMAWeightAveraging(decay=0.9),
            "should_update that returns True for an epoch_idx",
        ),
        (ToyModule(), BatchSizeFinder(), "BatchSizeFinder"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals(module, callback, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(module, *([callback] if callback else []))


def test_examples_that_change_by_epoch_are_refused():
    trainer = toy_trainer(Federation(), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ConfigurationError, match=r"every_n_epochs does not .* are divided once"):
        trainer.fit(ToyModule(), datamodule=toy_data())


def test_a_plain_data_module_is_refused():
    with pytest.raises(ConfigurationError, match="wrap yours as FederatedDataModule"):
        fit(ToyModule(), data=ToyData())
