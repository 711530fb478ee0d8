"""A data module that stands in for another: what it does not know itself, it asks the other."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule


class ForwardingDataModule(LightningDataModule):
    """Hands on to its source what a LightningModule, a Trainer or a logger asks of a data module.

    Attributes that it has itself go first; others, e.g. ``num_classes``, are the source's, and so are
    hyperparameters: they are logged and saved as if the source were used alone.

    Args:
        source: any data module.
    """

    def __init__(self, source: LightningDataModule) -> None:
        super().__init__()
        self.source = source
        self.prepare_data_per_node = source.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            source.allow_zero_length_dataloader_with_multiple_devices
        )
        # Lightning looks here whether hyperparameters are to be logged: found at the source instead
        vars(self).pop("_log_hyperparams", None)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the source; Python asks only for what is not found here.

        Raises:
            AttributeError: if the source does not have it either.
        """
        if hasattr(type(self), name):
            # a property that failed with an AttributeError: once more, for Python dropped the reason
            return object.__getattribute__(self, name)
        source = vars(self).get("source")  # none yet while this object is copied or unpickled
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
        """The source's hyperparameters."""
        return self.source.hparams

    @property
    def hparams_initial(self) -> Any:
        """The source's hyperparameters as they were saved."""
        return self.source.hparams_initial

    def prepare_data(self) -> None:
        """Let the source download or check its files."""
        self.source.trainer = self.trainer
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Let the source load."""
        self.source.trainer = self.trainer
        self.source.setup(stage)

    def teardown(self, stage: str) -> None:
        """Let the source clean up."""
        self.source.teardown(stage)
