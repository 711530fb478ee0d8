"""A data module that forwards to another one: attributes, hyperparameters, loaders and hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden

# Methods that Lightning calls on a data module only if they are overridden.
_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")
_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_exception",
)


class ForwardingDataModule(LightningDataModule):
    """Forwards attributes and hooks of a data module to its source.

    Attributes that this data module lacks, e.g. ``num_classes``, are the source's. Hyperparameters are
    logged and saved as if the source were used alone.

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
        # Lightning reads this flag to decide whether to log hyperparameters: use the source's
        vars(self).pop("_log_hyperparams", None)
        for name in (*_LOADERS, *_HOOKS):
            if is_overridden(name, source, LightningDataModule):
                method = getattr(source, name)
                setattr(self, name, partial(self._shown, method) if name in _LOADERS else method)

    def changed(self, loaders: Any) -> Any:
        """Return a loader, or several, as this data module shows them; unchanged by default."""
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
        """The source's hyperparameters."""
        return self.source.hparams

    @property
    def hparams_initial(self) -> Any:
        """The source's hyperparameters as they were first saved."""
        return self.source.hparams_initial

    def prepare_data(self) -> None:
        """Download or check the source's files."""
        self.source.trainer = self.trainer
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the source."""
        self.source.trainer = self.trainer
        self.source.setup(stage)

    def teardown(self, stage: str) -> None:
        """Tear down the source."""
        self.source.teardown(stage)
