"""The protected names that the loop stands on."""

import importlib
import inspect

import pytest
from lightning.pytorch.loops.optimization import automatic
from toys import ToyModule, toy_data, toy_trainer

from fl_lightning import ConfigurationError, Federation
from fl_lightning.federation import loop


def test_the_names_are_as_the_loop_expects_them():
    parameters = inspect.signature(automatic._AutomaticOptimization.run).parameters
    assert list(parameters) == ["self", "optimizer", "batch_idx", "kwargs"]
    epoch_loop = toy_trainer().fit_loop.epoch_loop
    assert type(epoch_loop.automatic_optimization) is automatic._AutomaticOptimization
    progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step
    assert progress.total.completed == 0
    assert callable(progress.increment_ready)
    assert callable(progress.increment_completed)


def test_a_changed_signature_is_found_at_import(monkeypatch):
    def run(self, optimizer, batch_idx, kwargs, something_new):
        """What a later Lightning might have."""

    monkeypatch.setattr(automatic._AutomaticOptimization, "run", run)
    with pytest.raises(ImportError, match=r"Lightning 2\.5 and 2\.6"):
        importlib.reload(loop)
    monkeypatch.undo()
    importlib.reload(loop)


def test_a_moved_seam_is_found_at_installation():
    trainer = toy_trainer(Federation())
    trainer.fit_loop.epoch_loop.automatic_optimization = object()
    with pytest.raises(ImportError, match=r"install lightning|Install lightning"):
        trainer.fit(ToyModule(), datamodule=toy_data())


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_second_federation_is_refused(method):
    trainer = toy_trainer(Federation(), Federation(local_steps=2))
    with pytest.raises(ConfigurationError, match="one Federation at most, got 2"):
        getattr(trainer, method)(ToyModule(), datamodule=toy_data())
