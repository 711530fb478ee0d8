"""Application of a mask to a module and its optimizer, and checks before a calibration.

A parameter without trained entries gets ``requires_grad = False``. For other parameters, the optimizer's masks
tell which entries train.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.reports.progress import federation_of
from fl_lightning.sparsity.masks.mask import Mask, some
from fl_lightning.sparsity.masks.maskable import freeze_masked, maskable_names
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer
from fl_lightning.sparsity.sensitivity.protocol import Sensitivity, module_logits


class MaskApplier:
    """Freezes the entries outside a mask in a Trainer's module and optimizer, and unfreezes them at the end.

    Args:
        trainer: Trainer with one masked optimizer.
        heads: names of the modules that form the head.
        head_trains: whether all entries of the head's parameters outside the mask train.

    Attributes:
        dense: names of the head's parameters of which all entries train.

    Raises:
        ConfigurationError: if the optimizer is no `MaskedOptimizer`.
    """

    def __init__(self, trainer: Trainer, heads: Sequence[str], *, head_trains: bool) -> None:
        self._module: nn.Module = trainer.lightning_module
        self._optimizer = _masked_optimizer(trainer)
        self._params = dict(self._module.named_parameters())
        self._trained = [name for name, p in self._params.items() if p.requires_grad]
        self._in_head = tuple(f"{head}." for head in heads)
        self._head_trains = head_trains
        self.dense: list[str] = []

    def names(self, include: Sequence[str] | None, exclude: Sequence[str]) -> list[str]:
        """Return the names of the parameters that a mask covers, as chosen by `maskable_names`.

        The head is included only if it trains and ``include`` names it.

        Raises:
            ConfigurationError: if there are none.
        """
        names = maskable_names(self._module, include=include, exclude=exclude)
        if include is None or not self._head_trains:
            names = [name for name in names if not name.startswith(self._in_head)]
        if not names:
            raise ConfigurationError(
                "include names only the head, which is frozen: there is nothing to mask. Set head: train, "
                "or include other parameters"
            )
        return names

    def apply(self, mask: Mask) -> None:
        """Freeze all entries outside the mask; if the head (classifier) trains, its entries stay trainable.

        Raises:
            ConfigurationError: if the mask does not fit the module, or covers frozen parameters.
        """
        mask.check_fits(self._module)
        self._check_trained(mask)
        head = self._in_head if self._head_trains else ()
        self.dense = [n for n in self._trained if n not in mask and n.startswith(head)]
        for name in self._trained:
            moves = name in mask or name in self.dense
            self._params[name].requires_grad_(moves)
            if not moves:
                self._params[name].grad = None
        freeze_masked(self._module, mask)
        self._optimizer.set_masks({self._params[name]: bits for name, bits in mask.items()})

    def _check_trained(self, mask: Mask) -> None:
        owned = {p for group in self._optimizer.param_groups for p in group["params"]}
        if foreign := [n for n in mask if n in self._params and self._params[n] not in owned]:
            raise ConfigurationError(
                f"the mask covers {some(foreign)}, which the optimizer does not train: leave them out "
                "with exclude, or give the optimizer all parameters"
            )
        if frozen := [n for n in mask if n not in self._trained]:
            raise ConfigurationError(
                f"the mask covers {some(frozen)}, which the model has frozen (requires_grad is "
                "False): unfreeze it, or use another mask"
            )
        fixed = [n for n in mask if n.startswith(self._in_head)]
        if fixed and not self._head_trains:
            raise ConfigurationError(
                f"the mask covers {some(fixed)} of the head, which is frozen: set head: train"
            )

    def described(self, mask: Mask) -> str:
        """Return in words how many entries of parameters outside a mask train, and how many are frozen."""
        dense = sum(self._params[name].numel() for name in self.dense)
        everything = sum(p.numel() for p in self._params.values())
        frozen = everything - mask.num_entries - dense
        return f"other parameters: {dense:,} train, {frozen:,} are frozen"

    def undo(self) -> None:
        """Unfreeze all parameters that were trainable before the first mask was applied."""
        for name in self._trained:
            self._params[name].requires_grad_(True)


def _masked_optimizer(trainer: Trainer) -> MaskedOptimizer:
    """Return a Trainer's optimizer, or raise ConfigurationError if it is no `MaskedOptimizer`."""
    optimizers = trainer.optimizers
    if len(optimizers) == 1 and isinstance(optimizers[0], MaskedOptimizer):
        return optimizers[0]
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    twin = "SparseAdamW" if any("Adam" in kind for kind in kinds) else "SparseSGDM"
    raise ConfigurationError(
        f"MaskCalibration needs one masked optimizer, because {kinds} would move frozen "
        f"entries. In the YAML write under the model's init_args:  optimizer: {{class_path: "
        f"fl_lightning.sparsity.{twin}, init_args: {{lr: …}}}}"
    )


def heads_of(module: nn.Module, head_name: str | None, *, is_needed: bool) -> list[str]:
    """Return the names of the modules that form the head (classifier): ``head_name``, or those that timm knows.

    Raises:
        ConfigurationError: if there is no such module, or the head is needed and unknown.
    """
    known = [name for name, _ in module.named_modules() if name]
    if head_name is not None and head_name not in known:
        raise ConfigurationError(
            f"head_name: {type(module).__name__} has no module {head_name!r}; there are "
            f"{some(known, 8)}"
        )
    heads = head_names(module) if head_name is None else [head_name]
    if not heads and is_needed:
        raise ConfigurationError(
            f"the head of {type(module).__name__} is unknown (it has no get_classifier): set "
            f"head_name to one of {some(known[::-1], 8)}; or set include to mask the head like "
            "other layers"
        )
    return heads


def check_run(trainer: Trainer, calibration: Callback, *, per_client: bool) -> None:
    """Raise ConfigurationError if masks cannot be used with the Trainer's strategy or order of callbacks."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    federation = federation_of(trainer)
    if federation is None:
        if per_client:
            raise ConfigurationError(
                "MaskCalibration: per_client needs a Federation, whose clients apply their own masks; "
                "this run has none. Leave per_client out for one mask for all"
            )
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ConfigurationError(
                "without a Federation, MaskCalibration runs in one process, got "
                f"{trainer.world_size} with {type(trainer.strategy).__name__}: set "
                "trainer.devices to 1"
            )
    elif callbacks.index(federation) < callbacks.index(calibration):
        raise ConfigurationError(
            "MaskCalibration must come before Federation in the Trainer's callbacks, because a "
            "federation needs the mask when it starts: Trainer(callbacks=[calibration, "
            "federation])"
        )


def check_forward(module: LightningModule, sensitivity: Sensitivity | None) -> None:
    """Raise ConfigurationError if scoring entries needs ``module(x)``, and the module has no ``forward``."""
    scoring = getattr(sensitivity, "scoring", None)
    uses_forward = sensitivity is None or getattr(scoring, "logits", None) is module_logits
    if uses_forward and not is_overridden("forward", module, LightningModule):
        raise ConfigurationError(
            f"{type(module).__name__} has no forward, from whose logits sensitivity is scored: "
            "define forward(x), or give sensitivity a scoring with a function logits(module, "
            "batch)"
        )
