"""The engine is a matter of speed: the same rounds come out, and what slots cannot run is named."""

import logging

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from toys import ToyModule, toy_data, toy_trainer, weights

from fl_lightning import ClientFailure, ConfigurationError, Federation, UniformCohort

COHORT = UniformCohort(size=4)


def run(module, engine="slots", *callbacks, data=None, max_epochs=3, ckpt=None, trainer=None, **o):
    options = {"cohort": COHORT, "seed": 0, "local_epochs": 2, "slots": 3} | o
    federation = Federation(engine=engine, **options)
    trainer = toy_trainer(federation, *callbacks, max_epochs=max_epochs, **(trainer or {}))
    trainer.fit(module, datamodule=data or toy_data(), ckpt_path=ckpt)
    return trainer


def toy(kind=ToyModule, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**options)


class Conv(ToyModule):
    """Reads the four numbers as an image of two by two."""

    def __init__(self, **options):
        super().__init__(**options)
        conv = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU())
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), conv, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6, 3)
        )


class Attention(ToyModule):
    """Reads the four numbers as a sequence."""

    def __init__(self, **options):
        super().__init__(**options)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(
            nn.Unflatten(1, (4, 1)), nn.Linear(1, 8), block, nn.Flatten(), nn.Linear(32, 3)
        )


@pytest.mark.parametrize("kind", [ToyModule, Conv, Attention])
@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.2}])
def test_slots_and_sequence_agree_after_five_rounds(kind, trainer):
    one, many = toy(kind), toy(kind)
    first = run(one, "sequential", max_epochs=5, trainer=trainer)
    second = run(many, "slots", max_epochs=5, trainer=trainer)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-5, atol=1e-6)
    assert first.callback_metrics.keys() == second.callback_metrics.keys()
    for name, value in first.callback_metrics.items():
        if name != "round/seconds":
            assert float(second.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4)


def test_in_double_precision_they_agree_to_the_last_digits():
    one, many = toy(), toy()
    double = {"precision": "64-true"}
    run(one, "sequential", trainer=double)
    run(many, "slots", trainer=double)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-12, atol=1e-12)


def test_batch_norm_trains_full_batches_in_slots_and_others_in_sequence():
    one, many = toy(batch_norm=True), toy(batch_norm=True)
    run(one, "sequential", data=toy_data(batch_size=4, drop_last=True))
    run(many, "slots", data=toy_data(batch_size=4, drop_last=True))
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-4, atol=1e-5)


class LogsEveryStep(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", 2 * loss, on_step=True, on_epoch=True)
        return loss


def test_a_loss_of_the_modules_own_stands_beside_ours():
    first, second = run(toy(LogsEveryStep), "sequential"), run(toy(LogsEveryStep), "slots")
    for name, value in first.callback_metrics.items():
        if name != "round/seconds":
            assert float(second.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4)
    logged = second.callback_metrics
    assert float(logged["train/loss_epoch"]) == pytest.approx(2 * float(logged["train/loss"]))


class Item(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 if loss.item() > -1 else 2.0)


class Branch(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > -1 else 2 * loss


class Index(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 == 0 else 2 * loss


class Recurrent(ToyModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.lstm(batch[0].unsqueeze(2))[0][:, -1, :3], batch[1])


class Measured(ToyModule):
    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        self.log("metric", self.metric)
        return loss


class Hooked(ToyModule):
    def on_after_backward(self):
        pass


class Lion(ToyModule):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: ToyModule(dropout=0.5), "random"),
        (Item, r"\.item\(\)"),
        (Branch, "data-dependent control flow"),
        (Index, "data-dependent control flow"),
        (Recurrent, "lstm"),
        (Measured, "torchmetrics|MeanMetric|data-dependent"),
        (Hooked, "Hooked defines on_after_backward"),
        (Lion, "RMSprop"),
    ],
)
def test_what_slots_cannot_run_is_named_and_trained_in_sequence(module, reason):
    one, many = toy(module), toy(module)
    run(one, "sequential")
    with pytest.warns(UserWarning, match=f"engine: sequential and not slots.*({reason})"):
        run(many, "slots")
    assert torch.equal(weights(one), weights(many))


def test_precision_and_accumulation_are_reasons_too():
    for trainer, reason in [
        ({"precision": "bf16-mixed"}, "bf16-mixed"),
        ({"accumulate_grad_batches": 2}, "accumulates"),
    ]:
        with pytest.warns(UserWarning, match=reason):
            run(toy(), trainer=trainer)


def test_auto_does_not_compile_for_a_short_run(caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        run(toy(), "auto", slots=None)
    assert "engine: sequential, because" in caplog.text
    assert "local steps do not repay a compiler" in caplog.text


class Poisoned(ToyModule):
    """Its loss is NaN where the first number of an example is one of the given."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        hit = (batch[0][:, :1] == self.bad).any()
        return loss * torch.where(hit, torch.nan, 1.0)


def poisoned(client):
    data = toy_data()
    data.setup("fit")
    return toy(Poisoned, bad=data.train_dataset.tensors[0][data.clients[client], 0]), data


def test_a_client_with_nan_is_named():
    module, data = poisoned(2)
    with pytest.raises(ClientFailure, match="round 0, client 2: its training loss is nan"):
        run(module, data=data, cohort=None)
    assert torch.equal(weights(module)[:-6], weights(toy(Poisoned, bad=module.bad))[:-6])


def test_a_client_with_nan_is_skipped_and_the_others_count():
    one, data = poisoned(2)
    skipping = {"cohort": None, "on_client_failure": "skip", "max_epochs": 1}
    with pytest.warns(UserWarning, match="skipped: round 0, client 2"):
        first = run(one, "sequential", data=data, **skipping)
    many, data = poisoned(2)
    with pytest.warns(UserWarning, match="skipped: round 0, client 2"):
        second = run(many, "slots", data=data, **skipping)
    torch.testing.assert_close(weights(one), weights(many), rtol=1e-5, atol=1e-6)
    for trainer in (first, second):
        assert trainer.callback_metrics["round/skipped"] == 1
        assert trainer.callback_metrics["round/cohort_size"] == 6


class SaveRound(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_keeps_to_its_slots(tmp_path):
    whole = toy()
    run(whole, "slots", SaveRound(tmp_path / "round.ckpt"), max_epochs=4)
    resumed = toy()
    run(resumed, "slots", slots=None, max_epochs=4, ckpt=tmp_path / "round.ckpt")
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"engine": "fast"}, "engine must be auto"), ({"slots": 0}, "slots must be at least 1")],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Federation(**options)
