"""Rounds of private runs that are broken off: counted, withheld, and their noise used up."""

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from toys import SaveEverywhere, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import (
    BandedMatrixDP,
    CentralDP,
    DistributedDP,
    ExampleDP,
    Federation,
    LocalDP,
)
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")
KINDS = [CentralDP, BandedMatrixDP, LocalDP, DistributedDP, ExampleDP]


class BreakOff(Callback):
    """Stops the run inside its second round, and saves when that is over."""

    sees_groups = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


class Models(Callback):
    """Keeps the model after every round."""

    def __init__(self, module):
        self.all = {-1: weights(module)}

    def on_train_epoch_end(self, trainer, module):
        self.all[trainer.current_epoch] = weights(module)

    def moved(self, round_index):
        before = max(index for index in self.all if index < round_index)
        return self.all[round_index] - self.all[before]


def private(kind, **options):
    defaults = {"noise_multiplier": 2.0, "delta": 1e-3, "secure_noise": False}
    return kind(clip_norm=0.1, log_unprotected=False, **{**defaults, **options})


def run(privacy, *callbacks, max_epochs=4, ckpt_path=None, module=None):
    seed_everything(0, verbose=False)
    federation = Federation(
        seed=4,
        engine="sequential",
        local_steps=2,
        clients_per_group=1,
        cohort=None if isinstance(privacy, CentralDP) else RoundRobinCohort(size=3),
        privacy=privacy,
    )
    trainer = toy_trainer(federation, *callbacks, max_epochs=max_epochs)
    trainer.fit(module or ToyModule(scheduler=False), datamodule=toy_data(), ckpt_path=ckpt_path)
    [privacy] = federation.rounds.stages.around_fit
    return trainer, privacy.ledger


def more(trainer):
    """Go on with the same Trainer."""
    trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, BreakOff)]
    trainer.should_stop = False  # older Lightning leaves that to whoever goes on
    trainer.fit(trainer.lightning_module, datamodule=trainer.datamodule)


def logged(trainer):
    return float(trainer.callback_metrics["privacy/epsilon"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_is_broken_off_tells_nothing_and_costs_what_was_sent(tmp_path, kind):
    path = tmp_path / "broken.ckpt"
    trainer, ledger = run(private(kind), BreakOff(path))
    names = {name for name in trainer.callback_metrics if not name.startswith(("val", "privacy"))}
    assert names == {"round/update_norm"}
    cost = [ledger.mechanism.epsilon(rounds) for rounds in range(5)]
    sent = 1 if kind in (CentralDP, BandedMatrixDP) else 2  # these have sent nothing noisy yet
    assert logged(trainer) == pytest.approx(cost[sent], rel=1e-4)
    # its clients take part in later rounds, whose cost is counted by their turns
    resumed, _ = run(private(kind), ckpt_path=path)
    more(trainer)
    assert [resumed.current_epoch, trainer.current_epoch] == [4, 4]
    assert [logged(resumed), logged(trainer)] == pytest.approx([cost[4]] * 2, rel=1e-4)
    assert torch.equal(weights(resumed.lightning_module), weights(trainer.lightning_module))


def test_the_correlated_noise_of_a_round_that_was_broken_off_is_used_up(tmp_path):
    """Updates are 0 (learning rate 0): later rounds move the model as if it had not been."""

    def still():
        torch.manual_seed(1)
        return ToyModule(lr=0.0, scheduler=False)

    module, path = still(), tmp_path / "broken.ckpt"
    whole, broken = Models(module), Models(module)
    run(private(BandedMatrixDP), whole, module=module)
    run(private(BandedMatrixDP), BreakOff(path), module=still())
    run(private(BandedMatrixDP), broken, module=still(), ckpt_path=path)
    broken.all[1] = broken.all.pop(-1) + whole.moved(0)
    for round_index in (2, 3):
        assert float(whole.moved(round_index).norm()) > 0.1
        assert torch.allclose(
            broken.moved(round_index), whole.moved(round_index), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(("kind", "epsilon"), [(LocalDP, 5.5), (ExampleDP, 3.5)])
def test_the_last_round_that_a_budget_allows_is_trained_again_when_it_was_interrupted(
    tmp_path, kind, epsilon
):
    """Four of nine planned rounds are allowed."""
    privacy = private(kind, epsilon=epsilon)
    trainer, _ = run(privacy, SaveEverywhere(tmp_path), max_epochs=9)
    for moment in ("3-group1", "3-group2", "3-validation", "3-end"):
        path = tmp_path / f"{moment}.ckpt"
        resumed, ledger = run(privacy, max_epochs=9, ckpt_path=path)
        assert torch.equal(weights(resumed.lightning_module), weights(trainer.lightning_module))
        assert [resumed.current_epoch, trainer.current_epoch, ledger.released] == [4, 4, 4]
    assert logged(trainer) <= epsilon
