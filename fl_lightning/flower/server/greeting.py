"""What a site is told when it is greeted: the run's configuration, and which entries may move by now."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from lightning.pytorch import Trainer

from fl_lightning.flower.messages import Order
from fl_lightning.flower.server.counted import Counted
from fl_lightning.flower.whole_model import mask_message, model_tensors
from fl_lightning.sparsity.masks.mask import Mask


class Greeting:
    """Writes the order ``hello`` as it is at the moment.

    With a mask comes the whole model: entries that may not move any more are what training has made of
    them, and no later order has them.

    Args:
        configuration: of the run, as YAML.
        counted: knows the run, and in which rounds clients counted.
        trainer: of the server.
        mask: gives the present mask; None before there is one, and in runs without.

    Attributes:
        digest: SHA-256 of the configuration.
        counted: as given.
    """

    def __init__(
        self,
        configuration: str,
        counted: Counted,
        trainer: Trainer,
        mask: Callable[[], Mask | None],
    ) -> None:
        self.digest = hashlib.sha256(configuration.encode()).hexdigest()
        self.counted = counted
        self._configuration, self._trainer, self._mask = configuration, trainer, mask

    @property
    def mask(self) -> str:
        """The hash of the present mask; empty if there is none."""
        mask = self._mask()
        return "" if mask is None else mask.hash()

    def order(self) -> Order:
        """Return the order."""
        options, tensors = {"configuration": self._configuration}, {}
        mask = self._mask()
        if mask is not None:
            options["mask"], tensors = mask_message(mask)
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
