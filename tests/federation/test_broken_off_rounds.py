"""A round that was interrupted, or whose step was undone, is trained again."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim import SGD, Adam
from toys import SaveEverywhere, SaveOnException, ToyModule, toy_data, validating_trainer, weights

from fl_lightning import BandedMatrixDP, CentralDP, ExampleDP, Federation, LocalDP, Scaffold
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
from fl_lightning.federation import Stage
from fl_lightning.nas.alpha_optimizer import ServerSearchStep
from fl_lightning.privacy.private_mean import AdaptiveClip

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
    trainer = validating_trainer(federation, *callbacks, max_epochs=max_epochs)
    trainer.fit(kind(scheduler=False), datamodule=toy_data(), ckpt_path=ckpt_path)
    [privacy] = federation.rounds.stages.around_fit
    return trainer, privacy


def logged(trainer):
    return float(trainer.callback_metrics["privacy/epsilon"])


@pytest.mark.parametrize(
    ("kind", "epsilon", "moments"),
    [(LocalDP, 5.5, ["3-inside", "3-trained", "3-end"]), (ExampleDP, 3.5, ["3-inside"])],
)
def test_the_last_round_that_a_budget_allows_is_trained_again_when_it_was_interrupted(
    tmp_path, kind, epsilon, moments
):
    """Four of nine planned rounds are allowed."""
    privacy = private(kind, epsilon=epsilon)
    trainer, _ = run(privacy, SaveEverywhere(tmp_path), max_epochs=9)
    saves = SaveOnException(tmp_path / "3-inside.ckpt")
    with pytest.raises(Stopped):
        run(privacy, saves, max_epochs=9, kind=Stops)
    for moment in moments:
        path = tmp_path / f"{moment}.ckpt"
        resumed, ledger = run(privacy, max_epochs=9, ckpt_path=path)
        assert torch.equal(weights(resumed.lightning_module), weights(trainer.lightning_module))
        assert [resumed.current_epoch, trainer.current_epoch, ledger.released] == [4, 4, 4]
    assert logged(trainer) <= epsilon


class Fails(Stage):
    """Fails in a round, after the server step: in ``stepped``, which undoes the step, or in ``close``."""

    traits = NO_TRAITS

    def __init__(self, round_index, method):
        self.round_index, self.method = round_index, method

    def open(self, round_index, model):
        self._opened = round_index

    def stepped(self, params):
        self._fail("stepped")

    def close(self, record):
        self._fail("close")

    def _fail(self, method):
        if (self._opened, method) == (self.round_index, self.method):
            raise Stopped


STATES = {
    "mean": {"correction": Scaffold()},
    "momentum": {"server_optimizer": partial(SGD, lr=1.0, momentum=0.9)},
    "clip norm": {
        "privacy": private(CentralDP, noise_multiplier=0.5, adaptive_clip=AdaptiveClip())
    },
    "noise": {"privacy": private(BandedMatrixDP), "cohort": RoundRobinCohort(size=3)},
    "moments of alpha": {
        "stage": partial(ServerSearchStep, ["net.4.weight"], partial(Adam, lr=0.1), local_lr=0.1)
    },
}


@pytest.mark.parametrize(
    ("state", "method"),
    [*((state, "stepped") for state in STATES), ("mean", "close"), ("noise", "close")],
)
def test_a_failed_round_leaves_no_state_ahead_of_the_model_or_behind(tmp_path, state, method):
    def run(*callbacks, round_index=9, ckpt_path=None):
        seed_everything(0, verbose=False)
        given = {"engine": "sequential", "local_steps": 2, "seed": 4, **STATES[state]}
        stages = [stage()] if (stage := given.pop("stage", None)) else []
        federation = Federation(stages=[*stages, Fails(round_index, method)], **given)
        trainer = validating_trainer(federation, *callbacks, max_epochs=4)
        module = ToyModule(momentum=0.0)  # with a schedule by round
        trainer.fit(module, datamodule=toy_data(), ckpt_path=ckpt_path)
        counts = [trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch]
        return [*counts, *weights(module).tolist()]

    path = tmp_path / "failed.ckpt"
    with pytest.raises(Stopped):
        run(SaveOnException(path), round_index=2)
    assert run(ckpt_path=path) == run()
