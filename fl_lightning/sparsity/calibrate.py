"""Calibration of one module on one set of examples, in a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, preserve_global_generators, seed_global_generators
from fl_lightning.sparsity.calibration import Calibration
from fl_lightning.sparsity.fisher import SampledFisher
from fl_lightning.sparsity.mask import Mask, some
from fl_lightning.sparsity.maskable import maskable_names
from fl_lightning.sparsity.plan import CalibrationPlan
from fl_lightning.sparsity.rules import Rule
from fl_lightning.sparsity.sensitivity import Sensitivity


def calibrate(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    density: float | None = None,
    sparsity: float | None = None,
    rule: Rule | None = None,
    sensitivity: Sensitivity | None = None,
    rounds: int = 4,
    progressive: bool = True,
    soft_mask: float = 0.01,
    per_tensor: bool = False,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Mask:
    """Return the mask of a module on some examples; the module stays as it is.

    Args:
        module: the model.
        batches: a loader or a list of batches; read once a round. Rules without scores read none.
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, instead of it.
        rule: which entries train; None is the least sensitive.
        sensitivity: how they are scored; None is `SampledFisher`, as in the paper.
        rounds: R ≥ 1; 1 is one-shot.
        progressive: False scores R times without masking anything, adds up, and drops once.
        soft_mask: factor of dropped entries while others are scored, in [0, 1]; 1 is off.
        per_tensor: one threshold a tensor, all with the same density, instead of a global one.
        names: the parameters that the mask covers; None is `maskable_names`.
        seed: of everything drawn, the order of a shuffling loader among it.

    Raises:
        ConfigurationError: if an option is out of range, or ``batches`` can be read only once.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> mask = calibrate(module, [torch.ones(3, 4)], density=0.25)
        >>> mask.num_active, mask.num_entries
        (14, 58)
    """
    plan = CalibrationPlan(
        density=density,
        sparsity=sparsity,
        rule=rule,
        rounds=rounds,
        progressive=progressive,
        soft_mask=soft_mask,
        per_tensor=per_tensor,
    )
    parameters = _named(module, names)
    calibration = Calibration(plan, parameters, seed=seed)
    if calibration.needs_scores and len(calibration.num_kept) > 1 and iter(batches) is batches:
        raise ConfigurationError(
            f"batches are read once in each of {rounds} rounds, but an iterator only once: give a "
            "loader or a list"
        )
    score = sensitivity or SampledFisher()
    while not calibration.is_done:
        scores = None
        if calibration.needs_scores:
            own = derive_seed(seed, "calibration", calibration.round)
            with preserve_global_generators():
                seed_global_generators(own)
                values = calibration.soft_parameters()
                scores = score(module, batches, parameters=values, seed=own)
        calibration.step(scores)
    return calibration.mask


def _named(module: nn.Module, names: Sequence[str] | None) -> dict[str, Tensor]:
    own: dict[str, Tensor] = dict(module.named_parameters())
    chosen = maskable_names(module) if names is None else list(names)
    if unknown := [name for name in chosen if name not in own]:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters {some(unknown)}; there are "
            f"{some(list(own))}"
        )
    if not chosen:
        raise ConfigurationError("names is empty: there is nothing to mask")
    return {name: own[name] for name in chosen}
