"""What a site is told when it is greeted: the run's configuration, and which entries may move by now."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.flower.messages import Order
from fl_lightning.flower.server.counted import Counted
from fl_lightning.flower.whole_model import RunMask, mask_message, model_tensors
from fl_lightning.sparsity.masks.mask import Mask


class Masks(Protocol):
    """Has the masks of a run."""

    @property
    def mask(self) -> Mask | None:
        """The present one; None before there is one."""

    @property
    def version(self) -> int:
        """Its number."""


class Greeting:
    """Writes the order ``hello`` as it is at the moment.

    With a mask comes the whole model: entries that may not move any more are what training has made of
    them, and no later order has them.

    Args:
        configuration: of the run, as YAML.
        counted: knows the run, and in which rounds clients counted.
        trainer: of the server.
        masks: of the run; None for one without.

    Attributes:
        digest: SHA-256 of the configuration.
        counted: as given.
    """

    def __init__(
        self,
        configuration: str,
        counted: Counted,
        trainer: Trainer,
        masks: Masks | None,
    ) -> None:
        self.digest = hashlib.sha256(configuration.encode()).hexdigest()
        self.counted = counted
        self._configuration, self._trainer, self._masks = configuration, trainer, masks

    @property
    def mask(self) -> RunMask | None:
        """The present mask; None if there is none."""
        if self._masks is None or self._masks.mask is None:
            return None
        return RunMask(self._masks.mask, self._masks.version)

    def order(self) -> Order:
        """Return the order."""
        options: dict[str, Any] = {"configuration": self._configuration}
        tensors: dict[str, Tensor] = {}
        if (mask := self.mask) is not None:
            more, tensors = mask_message(mask)
            options |= more
            options["num_clients"] = len(self._trainer.datamodule.clients)  # type: ignore[attr-defined]
            tensors |= model_tensors(self._trainer.lightning_module)
        return Order(
            kind="hello",
            run=self.counted.run,
            configuration=self.digest,
            round=self._trainer.current_epoch,
            counted=self.counted.rounds,
            options=options,
            tensors=tensors,
        )
