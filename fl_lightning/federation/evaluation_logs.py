"""`self.log` in validation and test: over the examples of all processes.

Processes evaluate different examples. What the module logs per epoch is therefore reduced over them,
as with ``sync_dist=True``, without the module having to say so; a mean is weighted by batch sizes, as
it is in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size


class EvaluationLogs(Callback):
    """Shadows ``module.log`` during validation and test in several processes."""

    _batch: Any = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to reduce over processes."""
        if trainer.world_size > 1:
            # not an ordinary attribute, which the module's checkpoints or a copy would take along
            object.__setattr__(pl_module, "log", self._reducing(pl_module.log))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any
    ) -> None:
        """Note whose size weighs the values."""
        self._batch = batch

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        """Let what is logged between batches count once."""
        self._batch = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module its own ``log`` back."""
        self._batch = None
        vars(pl_module).pop("log", None)

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _reducing(self, log: Callable[..., None]) -> Callable[..., None]:
        def reducing_log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if not options.get("on_step"):  # processes may have different numbers of steps
                options.setdefault("sync_dist", True)
            if self._batch is not None and len(args) == 0:
                size = options.get("batch_size") or extract_batch_size(self._batch)
                # Lightning halves the sum of whole sizes over two processes to a whole number
                options["batch_size"] = float(size)
            log(name, value, *args, **options)

        return reducing_log
