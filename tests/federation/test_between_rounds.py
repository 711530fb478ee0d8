"""What happens around the clients' training: interruptions, hooks between rounds, evaluation."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from toys import ToyModule, federated, toy_data

from fl_lightning import (
    ConfigurationError,
)
from fl_lightning.models import Schedule


def fit(module, *callbacks, data=None, max_epochs=2, **options):
    options = {"local_steps": 2, **options}
    return federated(module, *callbacks, data=data, trainer={"max_epochs": max_epochs}, **options)[
        1
    ]


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


def test_changes_that_hooks_make_between_rounds_are_kept():
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
    fit(module, max_epochs=3)
    assert module.temperature == 0.125


def test_the_frequency_of_a_schedule_counts_rounds():
    class EveryOther(ToyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            config = {"scheduler": scheduler, "interval": "epoch", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trainer = fit(EveryOther(), max_epochs=4)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


class Scheduled(ToyModule):
    """With a schedule's factors."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)]


@pytest.mark.parametrize(("kind", "warmup"), [("cosine", 2), ("step", 0)])
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
    assert (
        "round 3: a learning rate is 0, so the model does not change (the clients')." in caplog.text
    )
    assert "round 2: a learning rate" not in caplog.text


class Counting(ToyModule):
    """Counts examples in a torchmetrics object, fails where told."""

    def __init__(self, bad):
        super().__init__()
        self.seen, self.bad = torchmetrics.SumMetric(), bad

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.update(len(batch[1]))
        self.log_dict({"seen": self.seen, "seen_too": self.seen})
        return loss * torch.nan if torch.isin(batch[0][:, 0], self.bad).any() else loss


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


def test_lazy_layers_are_told_how_to_get_shapes():
    class Lazy(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(ConfigurationError, match="dummy batch"):
        fit(Lazy())
