"""What a calibration cannot work with: told before anything is computed, with the way out."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from fl_lightning.callbacks.calibration.owners import federation_of
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.sparsity.heads import HeadFit
from fl_lightning.sparsity.sensitivity.protocol import Sensitivity, module_logits

MASKS = Traits(breaks={Trait.ALL_PARAMETERS: "keeps parameters from training"})


def check_options(
    head: str | HeadFit,
    max_examples: int | None,
    every_n_rounds: int | None,
    mask_file: str | None,
    per_client: bool,
) -> None:
    """Refuse options out of range.

    Raises:
        ConfigurationError: with all of them.
    """
    issues = []
    if isinstance(head, str) and head not in ("train", "freeze"):
        issues.append(
            f"head must be train, freeze, or a fit such as fl_lightning.sparsity.RidgeHead, got "
            f"{head!r}"
        )
    if max_examples is not None and max_examples < 1:
        issues.append(f"max_examples must be at least 1, got {max_examples}; leave it out for all")
    if every_n_rounds is not None and every_n_rounds < 1:
        issues.append(
            f"every_n_rounds must be at least 1, got {every_n_rounds}; leave it out to keep the "
            "first mask"
        )
    if per_client and (every_n_rounds is not None or mask_file is not None):
        issues.append(
            "with per_client every client finds its mask once: leave out every_n_rounds and "
            "mask_file"
        )
    if issues:
        raise ConfigurationError("MaskCalibration: " + "; ".join(issues))


def check_callbacks(trainer: Trainer, calibration: Callback) -> None:
    """Refuse processes in step, and a federation that starts before its mask is known.

    Raises:
        ConfigurationError: with the order or the setting that works.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    federation = federation_of(trainer)
    if federation is None:
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ConfigurationError(
                "without a federation MaskCalibration runs in one process, got "
                f"{trainer.world_size} with {type(trainer.strategy).__name__}: set "
                "trainer.devices to 1"
            )
    elif callbacks.index(federation) < callbacks.index(calibration):
        raise ConfigurationError(
            "MaskCalibration must come before Federation in the Trainer's callbacks, because a "
            "federation settles at its start what travels: Trainer(callbacks=[calibration, "
            "federation])"
        )


def check_takes_masks(module: LightningModule) -> None:
    """Refuse a module that cannot train under a mask, as its ``federation_traits`` say.

    Raises:
        ConfigurationError: with its reason.
    """
    traits = getattr(module, "federation_traits", NO_TRAITS)
    check_together({f"model {type(module).__name__}": traits, "MaskCalibration": MASKS})


def check_forward(module: LightningModule, sensitivity: Sensitivity | None) -> None:
    """Refuse a module without logits to score.

    Raises:
        ConfigurationError: if it has no forward, and sensitivity no function of its own for logits.
    """
    scoring = getattr(sensitivity, "scoring", None)
    uses_forward = sensitivity is None or getattr(scoring, "logits", None) is module_logits
    if uses_forward and not is_overridden("forward", module, LightningModule):
        raise ConfigurationError(
            f"{type(module).__name__} has no forward, from whose logits sensitivity is scored: "
            "define forward(x), or give sensitivity a scoring with a function logits(module, "
            "batch)"
        )
