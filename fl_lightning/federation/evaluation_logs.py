"""`self.log` in validation and test: over the examples of all processes.

Processes evaluate different examples. What the module logs per epoch is therefore reduced over them,
as with ``sync_dist=True``, without the module having to say so; a mean is weighted by batch sizes, as
it is in one process. What is logged per step stays each process's own: their numbers of steps differ.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size


class EvaluationLogs:
    """Shadows a module's ``log`` between `start` and `stop`.

    Args:
        module: whose ``log`` is shadowed.

    Attributes:
        batch: what the present step evaluates; None between steps.
    """

    def __init__(self, module: LightningModule) -> None:
        self.batch: Any = None
        self._module = module
        self._log = module.log

    def start(self) -> EvaluationLogs:
        """Begin to reduce over processes."""
        # not an ordinary attribute, which is for the module's own parts
        object.__setattr__(self._module, "log", self.log)
        return self

    def stop(self) -> None:
        """Give the module its own ``log`` back."""
        vars(self._module).pop("log", None)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; the arguments are those of `LightningModule.log`."""
        if not options.get("on_step"):
            options.setdefault("sync_dist", True)
        if self.batch is not None:
            size = options.get("batch_size") or extract_batch_size(self.batch)
            # Lightning divides a whole number of examples by the number of processes and rounds down
            options["batch_size"] = float(size)
        self._log(name, value, *args, **options)
