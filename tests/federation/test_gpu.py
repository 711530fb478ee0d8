"""The same run on an accelerator: precisions, scaler, resume."""

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import TensorDataset
from toys import ToyData, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import ClientEvaluation, FederatedDataModule, Federation, UniformCohort

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class SaveInside(Callback):
    sees_groups = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1):
            trainer.save_checkpoint(self.path)


def run(*callbacks, precision="32-true", accelerator="gpu", ckpt_path=None):
    seed_everything(0, verbose=False)
    module = ToyModule(dropout=0.3 if accelerator == "gpu" else 0.0)
    federation = Federation(
        cohort=UniformCohort(size=3), clients_per_group=1, local_epochs=2, seed=0
    )
    trainer = toy_trainer(
        *(federation, *callbacks), precision=precision, accelerator=accelerator, devices=1
    )
    data = toy_data(client_val_fraction=0.2)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.cpu(), trainer


@pytest.mark.parametrize("precision", ["32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_trains_and_resumes_inside_a_round_to_the_same_bits(tmp_path, precision):
    path = tmp_path / "inside.ckpt"
    whole, trainer = run(SaveInside(path), ClientEvaluation(), precision=precision)
    assert trainer.global_step == 3
    resumed, _ = run(precision=precision, ckpt_path=path)
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_agrees_with_the_cpu(engine):
    def without_dropout(accelerator):
        seed_everything(0, verbose=False)
        module = ToyModule()
        options = {"accelerator": accelerator, "devices": 1, "precision": "64-true"}
        trainer = toy_trainer(Federation(seed=0, engine=engine), **options)
        trainer.fit(module, datamodule=toy_data(dtype=torch.float64))
        return weights(module.cpu())

    torch.testing.assert_close(
        without_dropout("gpu"), without_dropout("cpu"), rtol=1e-9, atol=1e-12
    )


class There(ToyData):
    """Holds its training examples where the model is."""

    def setup(self, stage):
        super().setup(stage)
        self.train = TensorDataset(*(tensor.cuda() for tensor in self.train.tensors))


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_examples_on_the_accelerator_are_the_same_examples(engine):
    def trained(source):
        seed_everything(0, verbose=False)
        module, federation = ToyModule(), Federation(seed=0, engine=engine)
        data = FederatedDataModule(source, num_clients=6, client_val_fraction=0.2, seed=0)
        trainer = toy_trainer(federation, ClientEvaluation(), accelerator="gpu", devices=1)
        trainer.fit(module, datamodule=data)
        return weights(module.cpu())

    assert torch.equal(trained(There()), trained(ToyData()))
