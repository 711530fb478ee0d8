"""The same run on an accelerator: precisions, scaler, resume, every kind of part."""

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import TensorDataset
from toys import ToyData, ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    APFL,
    Attackers,
    ClientEvaluation,
    Ditto,
    FedDyn,
    FederatedDataModule,
    Federation,
    FedProx,
    FineTuned,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.data import IID
from fl_lightning.server import (
    FedAdam,
    FedBuff,
    GeometricMedian,
    Krum,
    Median,
    SignFlip,
    TiltedMean,
    TrimmedMean,
)
from fl_lightning.updates import QSGD, Affine, ErrorFeedback, PowerSGD, RandomK, Sign, TopK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class SaveInside(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def run(*callbacks, precision="32-true", accelerator="gpu", ckpt_path=None):
    seed_everything(0, verbose=False)
    module = ToyModule(dropout=0.3 if accelerator == "gpu" else 0.0)
    federation = Federation(cohort=UniformCohort(size=3), local_epochs=2, seed=0)
    trainer = validating_trainer(
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
        trainer = validating_trainer(Federation(seed=0, engine=engine), **options)
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
        trainer = validating_trainer(federation, ClientEvaluation(), accelerator="gpu", devices=1)
        trainer.fit(module, datamodule=data)
        return weights(module.cpu())

    assert torch.equal(trained(There()), trained(ToyData()))


PARTS = {
    "FedProx": {"correction": FedProx(mu=0.1)},
    "FedDyn": {"correction": FedDyn(alpha=0.1)},
    "SCAFFOLD": {"correction": Scaffold()},
    "layers of one's own": {"personal": Personal(parameters=["net.4.*", "net.1.*"])},
    "Ditto": {"personal": Ditto(pull=0.5)},
    "APFL": {"personal": APFL()},
    "FineTuned": {"personal": FineTuned(local_steps=2)},
    "top-k with memory": {"updates": [ErrorFeedback((TopK(0.3),))]},
    "random-k": {"updates": [RandomK(0.5)]},
    "QSGD": {"updates": [QSGD(bits=4)]},
    "PowerSGD": {"updates": [PowerSGD(rank=1)]},
    "signs": {"updates": [Sign()]},
    "down in 8 bits": {"download": [Affine(bits=8)]},
    "tilted mean": {"aggregator": TiltedMean(tilt=0.5)},
    "median": {"aggregator": Median()},
    "trimmed mean": {"aggregator": TrimmedMean(num_attackers=1)},
    "Krum": {"aggregator": Krum(num_attackers=1)},
    "geometric median": {"aggregator": GeometricMedian()},
    "signs flipped by one": {
        "attackers": Attackers(fraction=0.2, forge=SignFlip()),
        "aggregator": Median(),
    },
    "FedAdam": {"server_optimizer": lambda p: FedAdam(p, lr=0.01)},
    "FedBuff": {
        "asynchronous": FedBuff(concurrency=3, buffer_size=2),
        "devices": Devices(speeds=LogNormalSpeeds()),
    },
}

ONE_BY_ONE = {"Ditto", "APFL"}  # clients take steps of their own


@pytest.mark.parametrize(
    ("part", "engine"),
    [(part, "sequential") for part in PARTS]
    + [(part, "slots") for part in PARTS if part not in ONE_BY_ONE],
)
def test_every_kind_of_part_ends_where_it_ends_on_the_cpu(part, engine):
    def trained(accelerator):
        seed_everything(0, verbose=False)
        # a bias ahead of batch norm has no gradient, but rounding has a sign
        module = ToyModule(batch_norm=part != "signs")
        options = {"accelerator": accelerator, "devices": 1}
        federation = Federation(seed=0, engine=engine, spot_check=1.0, **PARTS[part])
        trainer = validating_trainer(federation, precision="64-true", **options)
        data = toy_data(partition=IID(), batch_size=4, dtype=torch.float64)
        trainer.fit(module, datamodule=data)
        return weights(module.cpu())

    # what is sent, and what is logged, is in single precision
    torch.testing.assert_close(trained("gpu"), trained("cpu"), rtol=1e-6, atol=1e-8)


def test_after_a_fit_personal_models_are_where_the_module_is():
    seed_everything(0, verbose=False)
    module, federation = ToyModule(), Federation(seed=0, personal=FineTuned(local_steps=2))
    data = toy_data(client_val_fraction=0.2)
    trainer = validating_trainer(federation, accelerator="gpu", devices=1)
    trainer.fit(module, datamodule=data)
    assert module.device.type == "cpu"
    before = weights(module)
    with federation.personal_models(trainer).of(1):
        assert not torch.equal(weights(module), before)
    assert torch.equal(weights(module), before)
