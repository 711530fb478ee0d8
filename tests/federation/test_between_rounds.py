"""What happens around the clients' training: interruptions, hooks between rounds, evaluation."""

from queue import SimpleQueue

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from toys import SaveOnException, ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    ClientEvaluation,
    ClientFailure,
    ConfigurationError,
    Federation,
    PoissonCohort,
)
from fl_lightning.models import Schedule


class Interrupted(ToyModule):
    """Raises in the n-th training step of the run, if any."""

    def __init__(self, error=None, at=None):
        super().__init__(dropout=0.3)
        self.error, self.at = error, at
        self.steps = SimpleQueue()  # which no client's state is

    def training_step(self, batch, batch_idx):
        self.steps.put(batch_idx)
        if self.steps.qsize() == self.at:
            raise self.error
        return super().training_step(batch, batch_idx)


def fit(module, *callbacks, ckpt_path=None, data=None, max_epochs=2, **options):
    trainer = validating_trainer(
        *(Federation(**{"local_steps": 2, "seed": 3, **options}), *callbacks),
        max_epochs=max_epochs,
    )
    trainer.fit(module, datamodule=data or toy_data(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("cohort", [None, PoissonCohort(fraction=0.7)], ids=["all", "poisson"])
def test_a_checkpoint_of_an_interrupted_run_resumes_to_the_same_bits(tmp_path, cohort):
    def start(**options):
        seed_everything(0, verbose=False)
        return Interrupted(**options)

    whole = start()
    fit(whole, cohort=cohort)
    lost, stopped = RuntimeError("lost"), KeyboardInterrupt()
    for number, error in {1: stopped, 2: lost, 5: stopped, 11: lost, 16: stopped}.items():
        saving = SaveOnException(tmp_path / f"{number}.ckpt")
        with pytest.raises((ClientFailure, SystemExit, KeyboardInterrupt)):
            fit(start(error=error, at=number), saving, cohort=cohort)
        resumed = start()
        trainer = fit(resumed, cohort=cohort, ckpt_path=saving.path)
        assert torch.equal(weights(resumed), weights(whole)), number
        assert trainer.global_step == 2


def test_unfreezing_during_the_run_is_refused():
    class Unfreezes(ToyModule):
        def __init__(self):
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch > 0)

    with pytest.raises(ConfigurationError, match=r"net\.0\.bias was frozen or unfrozen"):
        fit(Unfreezes())


def test_a_callback_that_unfreezes_is_refused():
    class WithBackbone(ToyModule):
        @property
        def backbone(self):
            return self.net[0]

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    with pytest.raises(ConfigurationError, match="frozen or unfrozen"):
        fit(WithBackbone(), BackboneFinetuning(unfreeze_backbone_at_epoch=1))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_changes_that_hooks_make_between_rounds_are_kept(precision):
    class Changes(ToyModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("temperature", torch.ones(()))

        def on_train_epoch_start(self):
            self.temperature.mul_(0.5)
            self.net[0].weight.data.clamp_(-0.1, 0.1)
            self.largest = self.net[0].weight.abs().max().item()

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 0:
                assert self.net[0].weight.abs().max().item() == self.largest

    module = Changes()
    validating_trainer(Federation(seed=0), precision=precision).fit(module, datamodule=toy_data())
    assert module.temperature == 0.125


def test_buffers_that_are_not_saved_survive_a_resume(tmp_path):
    class Hidden(ToyModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("ema", torch.zeros(4), persistent=False)

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.ema.lerp_(batch[0].mean(0), 0.5)
            return super().training_step((batch[0] - self.ema, batch[1]), batch_idx)

    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    seed_everything(0, verbose=False)
    whole = Hidden()
    fit(whole, Save(), max_epochs=3)
    seed_everything(0, verbose=False)
    resumed = Hidden()
    fit(resumed, max_epochs=3, ckpt_path=tmp_path / "1.ckpt")
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.ema, whole.ema)


def test_draws_in_hooks_depend_on_the_round_alone(tmp_path):
    class Draws(ToyModule):
        def on_train_epoch_start(self):
            self.noise = torch.randn(())

    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    whole = Draws()
    fit(whole, max_epochs=3)
    fit(Draws(), Save(), max_epochs=2)
    torch.manual_seed(99)
    resumed = Draws()
    fit(resumed, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.noise == whole.noise


@pytest.mark.parametrize("num_clients", [3, 4])
def test_the_frequency_of_a_schedule_counts_rounds(num_clients):
    class EveryOther(ToyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            config = {"scheduler": scheduler, "interval": "epoch", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trainer = fit(EveryOther(), data=toy_data(num_clients=num_clients), max_epochs=4)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


class Scheduled(ToyModule):
    """With a schedule's factors."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)]


@pytest.mark.parametrize("kind", ["constant", "cosine", "step"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_every_round_of_a_schedule_trains(kind, warmup, caplog):
    schedule = Schedule(kind, warmup_rounds=warmup, step_every=1)
    norms = []

    class Norms(Callback):
        def on_train_epoch_end(self, trainer, module):
            norms.append(float(trainer.callback_metrics["round/update_norm"]))

    fit(Scheduled(lambda round: schedule.factor(round, 4)), Norms(), max_epochs=4)
    assert len(norms) == 4
    assert min(norms) > 1e-4
    assert "learning rate is 0" not in caplog.text


def test_rounds_at_rate_zero_are_told(caplog):
    fit(Scheduled(lambda round: float(round < 2)), max_epochs=3)
    assert "round 3: a learning rate is 0, so nothing moves (the clients' one)." in caplog.text
    assert "round 2: a learning rate" not in caplog.text


class Counting(ToyModule):
    """Counts examples in torchmetrics objects, fails where told."""

    def __init__(self, bad=None):
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.validated = torchmetrics.SumMetric()
        self.bad, self.counts = bad, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.update(len(batch[1]))
        self.log_dict({"seen": self.seen, "seen_too": self.seen})
        failing = self.bad is not None and torch.isin(batch[0][:, 0], self.bad).any()
        return loss * float("nan") if failing else loss

    def validation_step(self, batch):
        self.validated.update(len(batch[1]))

    def on_validation_epoch_end(self):
        self.counts.append(self.validated.compute().item())
        self.validated.reset()


def test_a_skipped_client_leaves_no_trace_in_torchmetrics():
    data = toy_data()
    data.setup("fit")
    bad = data.train_dataset.tensors[0][data.clients[2], 0]
    options = {"local_steps": None, "local_epochs": 1, "on_client_failure": "skip"}
    with pytest.warns(UserWarning, match="skipped: round 1, client 2"):
        trainer = fit(Counting(bad), data=data, max_epochs=1, **options)
    expected = data.clients.num_examples.sum() - len(data.clients[2])
    assert trainer.callback_metrics["seen"] == expected
    assert trainer.callback_metrics["seen_too"] == expected


def test_per_client_evaluation_leaves_the_modules_own_validation_alone():
    module = Counting()
    data = toy_data(client_val_fraction=0.3)
    with pytest.warns(UserWarning, match="no client has a metric"):  # the module logs none
        fit(module, ClientEvaluation(every_n_rounds=1), data=data, max_epochs=3)
    assert module.counts == [60, 60, 60]


@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
def test_per_client_evaluation_prepares_batches_as_lightning_does():
    class Sevens(ToyModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [torch.full_like(batch[0], 7.0), batch[1]]

        def validation_step(self, batch, batch_idx):
            assert (batch[0] == 7).all()
            super().validation_step(batch, batch_idx)

    fit(Sevens(), ClientEvaluation(), data=toy_data(client_val_fraction=0.3), max_epochs=1)


def test_lazy_layers_are_told_how_to_get_shapes():
    class Lazy(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(ConfigurationError, match="dummy batch"):
        fit(Lazy())
