"""Every figure says of which model it is."""

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from toys import ToyModule, toy_data, toy_trainer, validating_trainer

from fl_lightning import Federation
from fl_lightning.callbacks.standard_callbacks import every_round_checkpoint
from fl_lightning.cli.runs import saved_models
from fl_lightning.reports.evaluated_model import ModelOrigin, ResultsTable, saved_after


@pytest.fixture
def best(tmp_path):
    # the highest loss: of the first round
    return ModelCheckpoint(tmp_path, "best", monitor="val/loss", mode="max")


@pytest.fixture
def fitted(best):
    module, data = ToyModule(), toy_data()
    last = every_round_checkpoint()
    last.dirpath = best.dirpath
    trainer = validating_trainer(
        Federation(seed=0), ResultsTable(waits_for_test=True), best, last, enable_checkpointing=True
    )
    trainer.fit(module, datamodule=data)
    return trainer, module, data


def test_the_last_model_of_a_fit_the_best_one_and_a_fit_that_goes_on(fitted, best, caplog):
    trainer, module, data = fitted
    assert "the model" not in caplog.text
    trainer.test(module, datamodule=data, verbose=False)
    assert "test: the model after round 3, the last one of this fit" in caplog.text
    caplog.clear()
    trainer.validate(module, datamodule=data, ckpt_path=best.best_model_path, verbose=False)
    assert f"validate: the model after round 1, {best.best_model_path}" in caplog.text
    caplog.clear()
    trainer.test(module, datamodule=data, verbose=False)  # whose weights these still are
    assert f"test: the model after round 1, {best.best_model_path}" in caplog.text
    trainer.fit_loop.max_epochs = 4
    with pytest.warns(UserWarning, match="exists and is not empty"):
        trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert "test: the model after round 4, the last one of this fit" in caplog.text


def test_another_module_is_no_round_of_a_checkpoint(fitted, best, caplog):
    trainer, module, data = fitted
    trainer.test(module, datamodule=data, ckpt_path=best.best_model_path, verbose=False)
    caplog.clear()
    validating_trainer(ResultsTable(waits_for_test=True)).test(
        ToyModule(), datamodule=data, verbose=False
    )
    assert "test: the model as it was given, without a round of this Trainer" in caplog.text


def test_saved_models_are_told_with_their_rounds_the_last_one_first(fitted, best, tmp_path):
    found = saved_models(fitted[0])
    score = float(best.best_model_score)
    assert list(found.items()) == [
        (str(tmp_path / "last.ckpt"), "after round 3"),
        (str(tmp_path / "best.ckpt"), f"best val/loss, {score:.4f}, after round 1"),
    ]
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    assert saved_after(str(tmp_path / "broken.ckpt")) == saved_after("nowhere.ckpt") == ""


class Asks(Callback):
    """Notes what is said of the model at the end of each epoch, and of the fit."""

    def __init__(self):
        self.said = []

    def on_train_epoch_end(self, trainer, module):
        self.said.append(ModelOrigin().words(trainer))

    on_train_end = on_train_epoch_end


def test_a_central_fit_that_goes_on_is_not_at_its_last_model():
    asks = Asks()
    toy_trainer(asks, max_epochs=2).fit(ToyModule(), datamodule=toy_data())
    steps = [f"the model after optimizer step {n}" for n in (8, 16)]
    assert asks.said == [*steps, f"{steps[1]}, the last one of this fit"]


def test_a_central_run_counts_steps(tmp_path, caplog):
    module, data = ToyModule(), toy_data()
    trainer = validating_trainer(ResultsTable(waits_for_test=True), max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert "test: the model after optimizer step 8, the last one of this fit" in caplog.text
    trainer.save_checkpoint(tmp_path / "central.ckpt")
    assert saved_after(str(tmp_path / "central.ckpt")) == "after optimizer step 8"
