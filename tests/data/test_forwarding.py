"""What a stand-in for a data module hands on: attributes, hyperparameters, and its own errors."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from toys import ToyData, ToyModule, toy_data, toy_trainer

from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.federation import Federation


class Rich(ToyData):
    """A data module with attributes and hyperparameters of its own."""

    num_classes = 3

    def __init__(self, flavour="sweet", num_examples=60, *, log=True):
        super().__init__(num_examples=num_examples)
        self.save_hyperparameters(ignore="log", logger=log)
        self._private = 7

    @property
    def num_features(self):
        return 4

    @property
    def vocabulary(self):
        return self.not_there

    def tokenize(self, text):
        return text.split()

    def setup(self, stage):
        super().setup(stage)
        self.mean = self.train.tensors[0].mean().item()


def federated(**options):
    return FederatedDataModule(Rich(**options), num_clients=3, seed=0)


class TestAttributes:
    def test_are_the_sources(self):
        data = federated()
        assert (data.num_classes, data.num_features, data._private) == (3, 4, 7)
        assert data.tokenize("a b") == ["a", "b"]
        assert not hasattr(data, "mean")
        data.setup("fit")
        assert data.mean == data.source.mean
        data.source.num_clients = 99  # its own go first
        assert data.num_clients == 3

    def test_a_module_reads_them_where_lightning_lets_it_and_the_source_knows_the_trainer(self):
        class Asks(Rich):
            def prepare_data(self):
                assert self.trainer.max_epochs == 1

        class Reads(ToyModule):
            def configure_model(self):
                assert self.trainer.datamodule.num_classes == 3

            def setup(self, stage):
                self.head = nn.Linear(4, self.trainer.datamodule.num_classes)

            def training_step(self, batch, batch_idx):
                return nn.functional.cross_entropy(self.head(batch[0]), batch[1])

        module, data = Reads(), FederatedDataModule(Asks(), num_clients=3, seed=0)
        toy_trainer(Federation(seed=0), max_epochs=1).fit(module, datamodule=data)
        assert module.head.out_features == 3

    def test_of_neither_are_named_and_a_failure_inside_keeps_its_reason(self):
        with pytest.raises(
            AttributeError, match=r"'FederatedDataModule' .* 'colour', and its source: 'Rich'"
        ):
            _ = federated().colour
        assert getattr(federated(), "colour", None) is None
        with pytest.raises(AttributeError, match="no attribute 'not_there'"):
            _ = federated().vocabulary

        class Forgot(LightningDataModule):
            def train_dataloader(self):
                return self.forgotten

        with pytest.raises(AttributeError, match="'Forgot' object has no attribute 'forgotten'"):
            _ = FederatedDataModule(Forgot(), num_clients=2, seed=0).clients

    def test_survive_a_copy(self):
        for copied in (copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))):
            other = copied(federated())
            assert (other.num_classes, other.num_clients) == (3, 3)
            assert other.hparams == {"flavour": "sweet", "num_examples": 60}
            assert other.fingerprint == federated().fingerprint

    def test_names_that_python_asks_for_are_not_handed_on(self):
        class Callable_(Rich):
            def __call__(self):
                return 1

            def __getitem__(self, index):
                return index

        data = FederatedDataModule(Callable_(), num_clients=3)
        assert not callable(data)
        assert not hasattr(data, "__getitem__")

    @pytest.mark.parametrize("value", [True, False])
    def test_what_lightning_asks_of_every_data_module(self, value):
        source = ToyData()
        source.prepare_data_per_node = value
        source.allow_zero_length_dataloader_with_multiple_devices = value
        data = FederatedDataModule(source, num_clients=3)
        assert data.prepare_data_per_node is value
        assert data.allow_zero_length_dataloader_with_multiple_devices is value


class TestHyperparameters:
    """In checkpoint and log: what a run with the source alone writes there."""

    def written(self, data, folder, module=None):
        trainer = toy_trainer(
            *([Federation(seed=0)] if isinstance(data, FederatedDataModule) else []),
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
        )
        trainer.fit(module or ToyModule(), datamodule=data)
        trainer.save_checkpoint(folder / "one.ckpt")
        checkpoint = torch.load(folder / "one.ckpt", weights_only=False)
        names = {
            key: value for key, value in checkpoint.items() if "hparams" in key or "hyper" in key
        }
        return names, dict(trainer.logger.experiment.hparams)

    @pytest.mark.filterwarnings("ignore:.*number of training batches")
    @pytest.mark.parametrize(("log", "own"), [(True, False), (False, True)])
    def test_are_written_as_for_the_source_alone(self, tmp_path, log, own):
        class Own(ToyModule):
            def __init__(self, lr=0.1):
                super().__init__(lr=lr)
                self.save_hyperparameters()

        module = Own if own else ToyModule
        found = self.written(federated(log=log, flavour="salty"), tmp_path / "one", module())
        alone = self.written(Rich(log=log, flavour="salty"), tmp_path / "two", module())
        assert found == alone
        assert found[0]["datamodule_hyper_parameters"] == {"flavour": "salty", "num_examples": 60}
        assert ("flavour" in found[1]) is log
        loaded = Rich.load_from_checkpoint(tmp_path / "one/one.ckpt", weights_only=False)
        assert loaded.hparams.flavour == "salty"

    def test_none_are_none(self, tmp_path):
        found, logged = self.written(toy_data(), tmp_path)
        assert "datamodule_hyper_parameters" not in found
        assert logged == {}

    def test_changed_ones_are_the_sources(self):
        data = federated()
        data.hparams.flavour = "sour"
        assert data.source.hparams.flavour == "sour"
        assert data.hparams_initial.flavour == "sweet"
