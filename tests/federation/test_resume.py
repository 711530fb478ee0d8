"""A run taken up from any checkpoint ends in the same bits as one that was never stopped."""

from functools import partial
from queue import SimpleQueue

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torchmetrics import SumMetric
from toys import SaveEverywhere, SaveOnException, ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    ClientFailure,
    ConfigurationError,
    FedDyn,
    Federation,
    Scaffold,
    UniformCohort,
)
from fl_lightning.data.cohorts.weighted_cohorts import PowerOfChoiceCohort
from fl_lightning.updates import ErrorFeedback, TopK


def run(
    ckpt_path=None,
    callbacks=(),
    cohort=None,
    server_optimizer=None,
    seed=4,
    kind=ToyModule,
    federated=None,
    **options,
):
    seed_everything(0, verbose=False)
    module = kind(dropout=0.3, batch_norm=True)
    federation = Federation(
        cohort=cohort or UniformCohort(size=3),
        local_epochs=2,
        server_optimizer=server_optimizer,
        seed=seed,
        **(federated or {}),
    )
    trainer = validating_trainer(federation, *callbacks, max_epochs=4, **options)
    trainer.fit(module, datamodule=toy_data(batch_size=4, drop_last=True), ckpt_path=ckpt_path)
    return module, trainer


MOMENTS = "0-trained", "0-end", "1-validation", "3-trained", "3-end"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    momentum = {"lr": 0.7, "momentum": 0.5}
    options = {"server_optimizer": lambda p: torch.optim.SGD(p, **momentum)}
    module, trainer = run(callbacks=[SaveEverywhere(folder)], **options)
    return folder, options, weights(module), dict(trainer.callback_metrics)


@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_anywhere(uninterrupted, moment):
    folder, options, expected, metrics = uninterrupted
    module, trainer = run(ckpt_path=folder / f"{moment}.ckpt", **options)
    assert torch.equal(weights(module), expected)
    assert trainer.global_step == 4
    assert trainer.current_epoch == 4
    if moment not in ("3-trained", "3-end"):  # nothing was left to do, so nothing was logged
        for name in ("train/loss", "train/accuracy", "round/cohort_size", "train/loss_std"):
            assert trainer.callback_metrics[name] == metrics[name], name


class SaveAtStart(Callback):
    """Saves at the start of a round."""

    def __init__(self, path, round_):
        self.path, self.round = path, round_

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.round:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("moment", ["2-validation", "2-end"])
def test_a_run_resumed_at_the_start_of_a_round_can_be_resumed_again(
    uninterrupted, tmp_path, moment
):
    """Lightning counted its rounds one behind, and the second resumption left one out."""
    _, options, expected, _ = uninterrupted
    start = tmp_path / "start.ckpt"
    run(callbacks=[SaveAtStart(start, 1)], **options)
    run(ckpt_path=start, callbacks=[SaveEverywhere(tmp_path)], **options)
    module, trainer = run(ckpt_path=tmp_path / f"{moment}.ckpt", **options)
    assert torch.equal(weights(module), expected)
    assert trainer.global_step == 4


class Plateau(ToyModule):
    """Its rate is divided after each validation but the first: nothing improves by 100."""

    frequency = 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        options = {"patience": 0, "threshold": 100.0, "threshold_mode": "abs", "factor": 0.5}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        config = {"scheduler": plateau, "monitor": "val/loss", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class RarePlateau(Plateau):
    frequency = 2


@pytest.mark.parametrize(("kind", "every"), [(Plateau, 1), (RarePlateau, 1), (RarePlateau, 2)])
def test_a_plateau_is_counted_whenever_a_run_was_stopped(tmp_path, kind, every):
    """Lightning leaves its step out in the epoch from which it resumes, and forgets the last validation."""

    def ended(*callbacks, ckpt_path=None):
        module, trainer = run(
            ckpt_path, callbacks, kind=kind, check_val_every_n_epoch=every, federated={"stages": []}
        )
        return [trainer.optimizers[0].param_groups[0]["lr"], *weights(module).tolist()]

    whole = ended(SaveEverywhere(tmp_path))
    assert whole[0] == (0.05 if kind is Plateau else 0.2)
    paths = [*tmp_path.glob("[0-2]-validation.ckpt"), *tmp_path.glob("[0-2]-end.ckpt")]
    assert len(paths) == 3 + 3 // every
    for path in paths:
        assert ended(ckpt_path=path) == whole, path.name


@pytest.mark.parametrize("entry", ["stages", "record", "server"])
def test_a_checkpoint_of_another_layout_is_refused(uninterrupted, tmp_path, entry):
    folder, options, _, _ = uninterrupted
    checkpoint = torch.load(folder / "1-end.ckpt", weights_only=True)
    del checkpoint["callbacks"]["Federation"][entry]
    torch.save(checkpoint, tmp_path / "older.ckpt")
    with pytest.raises(ConfigurationError, match=f"no entry '{entry}': it was written by another"):
        run(ckpt_path=tmp_path / "older.ckpt", **options)


class Stopped(BaseException):
    """Not a client's failure: as when the user interrupts."""


class Stops(ToyModule):
    """Raises at the n-th local step of all, if any."""

    def __init__(self, at=-1, error=None, **options):
        super().__init__(**options)
        self.at, self.error, self.steps = at, error, SimpleQueue()  # which no client's state is

    def training_step(self, batch, batch_idx):
        if self.steps.qsize() == self.at:
            raise self.error
        self.steps.put(None)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("at", "error", "raised"),
    [
        (1, KeyboardInterrupt(), (KeyboardInterrupt, SystemExit)),  # by Lightning's version
        (17, RuntimeError("lost"), ClientFailure),
        (31, Stopped(), Stopped),
    ],
)
def test_a_run_stopped_inside_a_round_trains_it_again_to_the_same_model(
    uninterrupted, tmp_path, at, error, raised
):
    folder, options, expected, _ = uninterrupted
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(raised):
        run(kind=partial(Stops, at, error), callbacks=[SaveOnException(path)], **options)
    inside = torch.load(path, weights_only=True)
    assert inside["epoch"] < 4
    if inside["epoch"]:
        end = torch.load(folder / f"{inside['epoch'] - 1}-end.ckpt", weights_only=True)
        for name, tensor in end["state_dict"].items():
            assert torch.equal(tensor, inside["state_dict"][name]), name
    module, trainer = run(kind=Stops, ckpt_path=path, **options)
    assert torch.equal(weights(module), expected)
    assert (trainer.global_step, trainer.current_epoch) == (4, 4)


def test_checkpoints_hold_no_client_optimizer_state(uninterrupted):
    folder, *_ = uninterrupted
    checkpoint = torch.load(folder / "1-trained.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0]["state"] == {}


class CountsExamples(ToyModule):
    """Logs a torchmetrics object whose state is among the weights."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = SumMetric()
        self.seen.persistent(True)

    def training_step(self, batch, batch_idx):
        self.seen.update(len(batch[0]))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_among_the_weights_counts_every_client_once(tmp_path):
    seen = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append((trainer.current_epoch, float(trainer.callback_metrics["seen"])))

    run(kind=CountsExamples, callbacks=[SaveEverywhere(tmp_path), Notes()])
    expected = dict(seen)
    seen.clear()
    run(ckpt_path=tmp_path / "1-trained.ckpt", kind=CountsExamples, callbacks=[Notes()])
    assert seen
    assert all(value == expected[number] for number, value in seen)


class Failing:
    """Fails when called for the n-th time, from 0."""

    def __init__(self, number):
        self.left = number

    def __call__(self):
        self.left -= 1
        if self.left == -1:
            raise ZeroDivisionError("in the server's step")


def failing_server(number):
    fail = Failing(number)

    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            fail()

    return lambda params: Breaks(params, lr=0.7, momentum=0.5)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*no last checkpoint")
@pytest.mark.parametrize(
    ("part", "federated"),
    [
        ("server", {"correction": Scaffold()}),
        ("server", {"correction": FedDyn(0.1), "updates": [ErrorFeedback([TopK(0.5)])]}),
        ("metric", {"correction": Scaffold()}),
    ],
)
def test_a_round_whose_end_fails_leaves_no_trace(tmp_path, part, federated):
    """Neither memories nor their mean nor the server's momentum are ahead of the saved model."""

    def fit(number, *callbacks, **options):
        fail = Failing(number if part == "metric" else 99)

        class Sum(SumMetric):
            def compute(self):
                fail()
                return super().compute()

        class Counts(CountsExamples):
            def __init__(self, **arguments):
                super().__init__(**arguments)
                self.seen = Sum()
                self.seen.persistent(True)

        server = failing_server(number + 1 if part == "server" else 99)  # it is tried once before
        return run(
            kind=Counts,
            callbacks=callbacks,
            server_optimizer=server,
            federated=federated,
            **options,
        )[0]

    saves = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(ZeroDivisionError, match="in the server's step"):
        fit(1, saves, enable_checkpointing=True)
    resumed = fit(99, ckpt_path=tmp_path / "failed.ckpt")
    assert torch.equal(weights(resumed), weights(fit(99)))


class DrawsBetweenRounds(ToyModule):
    """Shakes its weights at the start of every round."""

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.net[0].weight.add_(0.1 * torch.randn_like(self.net[0].weight))


class SaveAtTheStartToo(SaveEverywhere):
    def on_train_epoch_start(self, trainer, module):
        self.save(trainer, "start")


def test_the_start_of_a_round_is_the_same(tmp_path):
    options = {
        "kind": DrawsBetweenRounds,
        "cohort": PowerOfChoiceCohort(size=3, num_candidates=5),  # by losses measured just then
    }
    expected, _ = run(callbacks=[SaveAtTheStartToo(tmp_path)], **options)
    for moment in ("0-start", "1-start", "1-validation"):
        module, trainer = run(ckpt_path=tmp_path / f"{moment}.ckpt", **options)
        assert torch.equal(weights(module), weights(expected)), moment
        assert trainer.global_step == 4


def test_another_seed_is_refused(uninterrupted):
    folder, options, *_ = uninterrupted
    with pytest.raises(ConfigurationError, match="another seed"):
        run(ckpt_path=folder / "1-end.ckpt", seed=5, **options)


def test_another_partition_is_refused(uninterrupted):
    folder, *_ = uninterrupted
    module = ToyModule(dropout=0.3, batch_norm=True)
    trainer = validating_trainer(Federation(cohort=UniformCohort(size=3), seed=4))
    with pytest.raises(ConfigurationError, match="another partition"):
        trainer.fit(
            module,
            datamodule=toy_data(seed=1, batch_size=4, drop_last=True),
            ckpt_path=folder / "1-end.ckpt",
        )
