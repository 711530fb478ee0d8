"""Speedups in a federation: the same rounds, found by measuring or asked for."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from toys import SaveEverywhere, ToyData, ToyModule, validating_trainer, weights

from fl_lightning import ConfigurationError, FederatedDataModule, Federation, UniformCohort
from fl_lightning.federation.clients import choice, trial

SGD_SPEEDUPS = ["channels_last", "direct_layers", "fused_optimizer"]
WANT_A_LAYOUT = {"channels_last", "direct_layers"}


class Images(ToyData):
    def setup(self, stage):
        super().setup(stage)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.num_examples, 3, 16, 16, generator=generator, dtype=self.dtype)
        self.train = self.val = TensorDataset(x, self.train.tensors[1])


class Conv(ToyModule):
    """A small convolutional network with a large dense layer."""

    def __init__(self, flat=None, **options):
        super().__init__(**options)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(options.get("dropout", 0.0)),
            flat or nn.Flatten(), nn.Linear(8 * 49, 300), nn.ReLU(), nn.Linear(300, 3),
        )  # fmt: skip


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)  # wants the usual layout


class Flat(ToyModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))


def run(kind=Conv, engine="sequential", speedups=None, *callbacks, ckpt=None, **o):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kind() if isinstance(kind, type) else kind
    federation = Federation(
        cohort=UniformCohort(size=3),
        engine=engine,
        speedups=speedups,
        local_epochs=2,
        seed=0,
    )
    trainer = validating_trainer(federation, *callbacks, max_epochs=2, **o)
    data = FederatedDataModule(Images(), num_clients=6, seed=0)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, trainer


@pytest.fixture
def long_run(monkeypatch):
    """Have every run count as one that repays a trial, and every speedup that agrees as one."""
    monkeypatch.setattr(choice, "SPEEDUP_SECONDS", 0.0)
    monkeypatch.setattr(choice, "LEAST_STEPS", 0)
    monkeypatch.setattr(choice, "SHARE_OF_SPEEDUPS", 1e9)
    monkeypatch.setattr(trial, "SECONDS_OF_A_TURN", 0.001)
    monkeypatch.setattr(choice, "LEAST_BY_SPEEDUP", 1e-9)


def speedups_of(trainer):
    return trainer.callbacks[0].state_dict()["engine"]["speedups"]


def test_the_same_model_after_two_rounds_in_which_nothing_of_them_stays():
    plain, first = run(gradient_clip_val=0.1)
    fast, second = run(speedups=SGD_SPEEDUPS, gradient_clip_val=0.1)
    torch.testing.assert_close(weights(fast), weights(plain), rtol=1e-6, atol=1e-6)
    assert not torch.equal(weights(fast), weights(plain))  # they took part
    assert all(p.is_contiguous() for p in fast.parameters())
    assert not any("forward" in vars(layer) for layer in fast.modules())
    assert second.optimizers[0].param_groups[0]["fused"] is None
    for name in ("train/loss", "train/accuracy", "val/loss"):
        assert float(second.callback_metrics[name]) == pytest.approx(
            float(first.callback_metrics[name]), rel=1e-5
        )


def test_every_step_of_every_client_has_the_layout():
    layouts = set()

    class Seen(Conv):
        def training_step(self, batch, batch_idx):
            layouts.add(self.net[0].weight.stride())
            return super().training_step(batch, batch_idx)

    run(Seen, speedups=["channels_last"])
    assert layouts == {(27, 1, 9, 3)}


@pytest.mark.usefixtures("long_run")
def test_auto_measures_says_and_keeps(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        module, trainer = run(Conv, "auto", None, SaveEverywhere(tmp_path))
    assert "engine: sequential with direct_layers, channels_last, fused_optimizer (" in caplog.text
    told = "engine: measuring which speedups make steps faster, for 120 s at most"
    assert re.search(rf"{told}[^$]*engine: sequential with", caplog.text)
    assert sorted(speedups_of(trainer)) == SGD_SPEEDUPS
    forced, _ = run(speedups=SGD_SPEEDUPS)
    assert torch.equal(weights(module), weights(forced))  # asked for, the same bits


@pytest.mark.usefixtures("long_run")
def test_a_resumed_run_keeps_to_it(tmp_path, monkeypatch):
    expected, _ = run(Conv, "auto", None, SaveEverywhere(tmp_path))
    monkeypatch.undo()  # by itself it would choose none
    for moment in ("0-trained", "0-end"):
        module, trainer = run(Conv, "auto", None, ckpt=tmp_path / f"{moment}.ckpt")
        assert sorted(speedups_of(trainer)) == SGD_SPEEDUPS
        assert torch.equal(weights(module), weights(expected)), moment


@pytest.mark.slow
@pytest.mark.usefixtures("long_run")
def test_compiled_where_a_run_is_long_and_again_when_resumed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(choice, "COMPILED_STEP_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "lightning"):
        module, trainer = run(Conv, "auto", None, SaveEverywhere(tmp_path))
    assert re.search(r"engine: sequential with .*compiled \(", caplog.text)
    assert speedups_of(trainer)[-1] == "compiled"
    monkeypatch.undo()
    plain, first = run()
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-5, atol=1e-6)
    for name in ("train/loss", "train/accuracy"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(
            float(first.callback_metrics[name]), rel=1e-5
        )
    resumed, _ = run(Conv, "auto", None, ckpt=tmp_path / "0-trained.ckpt")
    assert torch.equal(weights(resumed), weights(module))


class Counting(Conv):
    """Updates a torchmetrics object, which no graph can."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss


@pytest.mark.slow
def test_what_no_graph_can_hold_runs_as_it_is():
    """Metrics, logs and dropout, with the numbers that it draws by itself."""
    ends = [run(Counting, speedups=some)[0] for some in (None, ["compiled"])]
    torch.testing.assert_close(*map(weights, ends), rtol=1e-5, atol=1e-6)
    assert ends[0].mean.update_count == ends[1].mean.update_count


@pytest.mark.usefixtures("long_run")
@pytest.mark.parametrize(
    "module",
    [
        lambda: Conv(flat=View()),
        lambda: Conv(dropout=0.5),  # its draws would fall on other pixels
    ],
)
def test_what_changes_the_update_is_left_out(module):
    torch.manual_seed(0)
    _, trainer = run(module(), "auto")
    assert sorted(speedups_of(trainer)) == [s for s in SGD_SPEEDUPS if s not in WANT_A_LAYOUT]


def test_a_short_run_is_plain():
    plain, _ = run()
    auto, trainer = run(Conv, "auto")
    assert speedups_of(trainer) == []
    assert torch.equal(weights(plain), weights(auto))


@pytest.mark.parametrize(
    ("module", "speedup", "options", "message"),
    [
        (Flat, "channels_last", {}, "no convolution"),
        (Conv, "fused_optimizer", {"accumulate_grad_batches": 2}, "accumulation"),
    ],
)
def test_what_does_not_apply_is_refused(module, speedup, options, message):
    with pytest.raises(ConfigurationError, match=message):
        run(module, speedups=[speedup], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_compiled_step_reads_what_hooks_put_into_the_module():
    """As MixUp does: how a batch is mixed is drawn where it arrives."""

    class MixUp(ToyModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = batch
            if self.trainer.training:
                self.share = torch.rand(())
                self.other = torch.randperm(len(x))
                x = self.share * x + (1 - self.share) * x[self.other]
            return x, y

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            one, other = F.cross_entropy(out, y), F.cross_entropy(out, y[self.other])
            return self.share * one + (1 - self.share) * other

    def end(speedups):
        torch.manual_seed(0)
        module = MixUp()
        federation = Federation(speedups=speedups, engine="sequential", local_epochs=2, seed=0)
        data = FederatedDataModule(ToyData(num_examples=120, drop_last=True), num_clients=3, seed=0)
        validating_trainer(federation, max_epochs=2).fit(module, datamodule=data)
        return weights(module)

    torch.testing.assert_close(end(["compiled"]), end(None), rtol=1e-5, atol=1e-6)
