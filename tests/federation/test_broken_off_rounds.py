"""A round that was interrupted, or whose step was undone, is trained again."""

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import SaveEverywhere, SaveOnException, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import ExampleDP, Federation, LocalDP, Scaffold
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.federation import Stage

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")


class Stopped(BaseException):
    """Not a client's failure: as when the user interrupts."""


class Stops(ToyModule):
    """Stops the run in its fourth round."""

    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 3:
            raise Stopped
        return super().training_step(batch, batch_idx)


def private(kind, **options):
    defaults = {"noise_multiplier": 2.0, "delta": 1e-3, "secure_noise": False}
    return kind(clip_norm=0.1, log_unprotected=False, **{**defaults, **options})


def run(privacy, *callbacks, max_epochs=4, ckpt_path=None, kind=ToyModule):
    seed_everything(0, verbose=False)
    federation = Federation(
        seed=4,
        engine="sequential",
        local_steps=2,
        cohort=RoundRobinCohort(size=3),
        privacy=privacy,
    )
    trainer = toy_trainer(federation, *callbacks, max_epochs=max_epochs)
    trainer.fit(kind(scheduler=False), datamodule=toy_data(), ckpt_path=ckpt_path)
    [privacy] = federation.rounds.stages.around_fit
    return trainer, privacy


def logged(trainer):
    return float(trainer.callback_metrics["privacy/epsilon"])


@pytest.mark.parametrize(("kind", "epsilon"), [(LocalDP, 5.5), (ExampleDP, 3.5)])
def test_the_last_round_that_a_budget_allows_is_trained_again_when_it_was_interrupted(
    tmp_path, kind, epsilon
):
    """Four of nine planned rounds are allowed."""
    privacy = private(kind, epsilon=epsilon)
    trainer, _ = run(privacy, SaveEverywhere(tmp_path), max_epochs=9)
    saves = SaveOnException(tmp_path / "3-inside.ckpt")
    with pytest.raises(Stopped):
        run(privacy, saves, max_epochs=9, kind=Stops)
    for moment in ("3-inside", "3-trained", "3-validation", "3-end"):
        path = tmp_path / f"{moment}.ckpt"
        resumed, ledger = run(privacy, max_epochs=9, ckpt_path=path)
        assert torch.equal(weights(resumed.lightning_module), weights(trainer.lightning_module))
        assert [resumed.current_epoch, trainer.current_epoch, ledger.released] == [4, 4, 4]
    assert logged(trainer) <= epsilon


class Fails(Stage):
    """Fails after the server step of a round, which undoes the step."""

    traits = NO_TRAITS

    def __init__(self, round_index):
        self.round_index = round_index

    def open(self, round_index, model):
        self._opened = round_index

    def stepped(self, params):
        if self._opened == self.round_index:
            raise Stopped


def test_a_step_that_is_undone_leaves_no_stage_ahead_of_the_model(tmp_path):
    """The clients' mean of SCAFFOLD changes only with the model."""

    def corrected(*callbacks, round_index=9, ckpt_path=None):
        seed_everything(0, verbose=False)
        options = {"engine": "sequential", "correction": Scaffold(), "local_steps": 2, "seed": 4}
        federation = Federation(stages=[Fails(round_index)], **options)
        trainer = toy_trainer(federation, *callbacks, max_epochs=4)
        trainer.fit(ToyModule(momentum=0.0), datamodule=toy_data(), ckpt_path=ckpt_path)
        return weights(trainer.lightning_module)

    path = tmp_path / "failed.ckpt"
    with pytest.raises(Stopped):
        corrected(SaveOnException(path), round_index=2)
    assert torch.equal(corrected(ckpt_path=path), corrected())
