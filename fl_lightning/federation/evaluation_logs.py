"""`self.log` and `self.log_dict` in validation and test: over the examples of all processes.

Processes evaluate different examples. What the module logs per epoch is therefore reduced over them,
as with ``sync_dist=True``, without the module having to say so; a mean is weighted by batch sizes, as
it is in one process. What is logged per step stays each process's own: their numbers of steps differ.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size


class EvaluationLogs:
    """Shadows a module's ``log`` and ``log_dict`` between `start` and `stop`.

    Args:
        module: whose methods are shadowed.

    Attributes:
        batch: what the present step evaluates; None between steps.
    """

    def __init__(self, module: LightningModule) -> None:
        self.batch: Any = None
        self._module = module
        self._log = module.log
        self._log_dict = module.log_dict

    def start(self) -> EvaluationLogs:
        """Begin to reduce over processes."""
        # no ordinary attributes, which are for the module's own parts
        object.__setattr__(self._module, "log", self.log)
        object.__setattr__(self._module, "log_dict", self.log_dict)
        return self

    def stop(self) -> None:
        """Give the module its own methods back."""
        vars(self._module).pop("log", None)
        vars(self._module).pop("log_dict", None)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; the arguments are those of `LightningModule.log`."""
        if not options.get("on_step"):
            options.setdefault("sync_dist", True)
        if self.batch is not None:
            size = options.get("batch_size") or extract_batch_size(self.batch)
            # Lightning divides a whole number of examples by the number of processes and rounds down
            options["batch_size"] = float(size)
        self._log(name, value, *args, **options)

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Log several values; Lightning's ``log_dict`` gives `log` each with every option."""
        if not options.get("on_step"):
            options.setdefault("sync_dist", True)
        self._log_dict(dictionary, *args, **options)
