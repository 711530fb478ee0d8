"""Who trains between two looks of Lightning's loop is a matter of speed: results stay the same."""

from queue import SimpleQueue

import pytest
import torch
from lightning.pytorch import seed_everything
from toys import SaveOnException, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import Federation, PoissonCohort, UniformCohort
from fl_lightning.models import LeNet

DATA = {"batch_size": 4, "drop_last": True}


class Stopped(BaseException):
    """Not a client's failure: as when the user interrupts."""


class Stops(ToyModule):
    """Stops the run at its n-th local step of all."""

    def __init__(self, at):
        super().__init__(dropout=0.3, batch_norm=True)
        self.at, self.steps = at, SimpleQueue()  # which no client's state is

    def training_step(self, batch, batch_idx):
        if self.steps.qsize() == self.at:
            raise Stopped
        self.steps.put(None)
        return super().training_step(batch, batch_idx)


def fit(together, *callbacks, stop_at=-1, ckpt_path=None, size=5, cohort=None, **options):
    seed_everything(0, verbose=False)
    federation = Federation(
        cohort=cohort or UniformCohort(size=size),
        local_epochs=2,
        seed=4,
        clients_per_group=together,
        server_optimizer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5),
    )
    module = Stops(stop_at)
    trainer = toy_trainer(federation, *callbacks, **options)
    trainer.fit(module, datamodule=toy_data(**DATA), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("cohort", [UniformCohort(size=5), PoissonCohort(fraction=0.5)])
def test_the_model_does_not_depend_on_the_groups(cohort):
    expected, one = fit(1, cohort=cohort)
    for together in (2, 3, 5, None):
        module, trainer = fit(together, cohort=cohort)
        assert torch.equal(weights(module), weights(expected))
        assert trainer.global_step == one.global_step
        for name, value in one.callback_metrics.items():
            if name != "round/seconds":
                assert trainer.callback_metrics[name] == value, name


def test_a_run_stopped_inside_a_round_trains_it_again_to_the_same_model(tmp_path):
    path, (expected, _) = tmp_path / "stopped.ckpt", fit(1, max_epochs=2)
    for together, steps, then in [
        (1, 17, 1),
        (3, 1, 3),
        (3, 17, 5),
        (5, 17, 2),
        (5, 31, 5),
        (2, 31, 1),
    ]:
        with pytest.raises(Stopped):
            fit(together, SaveOnException(path), stop_at=steps, max_epochs=2)
        module, trainer = fit(then, ckpt_path=path, max_epochs=2)
        assert torch.equal(weights(module), weights(expected)), (together, steps, then)
        assert (trainer.global_step, trainer.current_epoch) == (2, 2)


@pytest.mark.parametrize(("network", "num_groups"), [(torch.nn.Linear(4, 3), 1), (LeNet(3), 6)])
def test_only_short_clients_are_taken_together(network, num_groups):
    module, data = ToyModule(), toy_data()
    module.net = network
    federation = Federation(local_epochs=10, engine="sequential", seed=0)
    trainer = toy_trainer(federation)
    trainer.datamodule = data
    federation.setup(trainer, module, "fit")
    assert len(data.train_dataloader()) == num_groups
