"""Base of data modules that wrap another one, their source, and behave like it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.training_set import TrainingSet, check_loader

# Methods that Lightning calls on a data module only if they are overridden.
_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")
_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_exception",
)


class ForwardingDataModule(LightningDataModule):
    """Base of data modules that wrap another one, the source, and pass on its attributes, hooks and loaders.

    Attributes that this data module lacks, e.g. ``num_classes``, are the source's. Hyperparameters are
    logged and saved as if the source were used alone.

    Args:
        source: any data module.
        ignore_sampler: whether to ignore the source's sampler, so that all examples are used.

    Raises:
        ConfigurationError: if ``source`` is no data module.
    """

    def __init__(self, source: LightningDataModule, *, ignore_sampler: bool = False) -> None:
        if not isinstance(source, LightningDataModule):
            raise ConfigurationError(
                f"source must be a LightningDataModule of lightning.pytorch, got a {type(source).__name__}: wrap a "
                "data set as LightningDataModule.from_datasets(data_set, batch_size=…), or write a "
                "LightningDataModule whose train_dataloader returns its DataLoader"
            )
        super().__init__()
        self.source, self.ignore_sampler = source, ignore_sampler
        self._is_set_up = False
        self.prepare_data_per_node = source.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            source.allow_zero_length_dataloader_with_multiple_devices
        )
        # Lightning reads this flag to decide whether to log hyperparameters: use the source's
        vars(self).pop("_log_hyperparams", None)
        for name in (*_LOADERS, *_HOOKS):
            if is_overridden(name, source, LightningDataModule):
                method = getattr(source, name)
                setattr(self, name, partial(self._shown, method) if name in _LOADERS else method)

    def changed(self, loaders: Any) -> Any:
        """Return the source's loaders, which a subclass may wrap, e.g. to transform batches; by default unchanged."""
        return loaders

    def _shown(self, method: Callable[[], Any]) -> Any:
        return self.changed(method())

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the source; Python calls this only for attributes not found here.

        Raises:
            AttributeError: if the source does not have it either.
        """
        if hasattr(type(self), name):
            # a property raised AttributeError: evaluate it again, because Python dropped the reason
            return object.__getattribute__(self, name)
        source = vars(self).get("source")  # missing while this object is copied or unpickled
        if source is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(source, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and its source: {error}",
                name=name,
                obj=self,
            ) from error

    @property
    def hparams(self) -> Any:
        """Hyperparameters of the wrapped data module (the source)."""
        return self.source.hparams

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters of the wrapped data module (the source), as it first saved them."""
        return self.source.hparams_initial

    def prepare_data(self) -> None:
        """Prepare the wrapped data module (the source), e.g. download its files."""
        self.source.trainer = self.trainer
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the wrapped data module (the source).

        Raises:
            ConfigurationError: if there is no data set to validate or test on.
        """
        trainer = self.trainer
        if trainer is not None and (trainer.validating or trainer.testing):
            name = "test_dataloader" if trainer.testing else "val_dataloader"
            if not any(is_overridden(name, each) for each in (self, trainer.lightning_module)):
                advice = (
                    "define one; clients' held-out examples are validated only beside such a set"
                )
                if trainer.testing:
                    advice = "define one, or set data.client_test_fraction to test on clients' own examples"
                raise ConfigurationError(
                    f"{stage} needs a {name} in {type(self.source).__name__}: {advice}"
                )
        self.source.trainer = trainer
        self.source.setup(stage)
        self._is_set_up = self._is_set_up or stage == "fit"

    def teardown(self, stage: str) -> None:
        """Tear down the wrapped data module (the source)."""
        self.source.teardown(stage)

    @cached_property
    def training(self) -> TrainingSet:
        """Training data set of the source, which knows the examples that the source's loader draws."""
        if not self._is_set_up:  # not twice, because a source may split at random
            self.setup("fit")
        loader, name = self.source.train_dataloader(), type(self.source).__name__
        check_loader(loader, f"{name}.train_dataloader()")
        return TrainingSet(loader, name, ignore_sampler=self.ignore_sampler)

    @property
    def train_dataset(self) -> Dataset[Any]:
        """Training data set of the wrapped data module, whose examples are divided among the clients."""
        return self.training.dataset

    @property
    def drop_last(self) -> bool:
        """True if the source's loader drops a smaller last batch; each client's local training then does as well.

        A client with less than one batch keeps its only batch, because otherwise it would not train.
        """
        return bool(self.training.option("drop_last"))

    @property
    def draw_weights(self) -> Tensor | None:
        """Sampling weight of every example if a pass draws with replacement, shape (N,); None if it draws each once."""
        return self.training.drawn.weights
