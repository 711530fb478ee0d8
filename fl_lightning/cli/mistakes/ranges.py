"""Seeds, and options of PyTorch's optimizers and schedules that PyTorch takes without a look.

A learning rate that is no number, or a step of 0 rounds, ends in a model of NaNs or in a division by
zero, some rounds later. Classes of this package check their own options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.cli.mistakes.constructors import named, specs
from fl_lightning.core.errors import ConfigurationError

_AT_LEAST_ZERO = (
    "lr",
    "eps",
    "weight_decay",
    "momentum",
    "lr_decay",
    "alpha",
    "eta_min",
    "patience",
    "min_lr",
)
_AT_LEAST_ONE = ("step_size", "T_max", "T_0", "T_mult", "total_iters", "epochs")


def check_ranges(configuration: Any) -> None:
    """Refuse values that mean nothing.

    Args:
        configuration: of a command, parsed.

    Raises:
        ConfigurationError: naming the option by its path in the YAML.
    """
    problems = [problem for path, spec in specs(configuration) for problem in _problems(path, spec)]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _problems(path: str, spec: Any) -> Iterator[str]:
    options = spec.get("init_args") or spec
    class_path = spec.get("class_path") or "fl_lightning"
    # a user's own class may mean something by -1, or by an infinite number
    is_ours, is_torchs = class_path.startswith("fl_lightning"), class_path.startswith("torch.")
    seed = options.get("seed") if is_ours and not path.endswith(".init_args") else None
    if isinstance(seed, int) and not 0 <= seed < 2**64:
        inside = ".init_args" if options is not spec else ""
        yield f"{path}{inside}.seed must be a whole number from 0 to 2^64 - 1, got {seed}"
    kind = named(spec.get("class_path") or "")
    if not (isinstance(kind, type) and issubclass(kind, (Optimizer, LRScheduler, Callback))):
        return
    for name, value in (
        vars(options).items() if is_ours or is_torchs or "lightning." in class_path else ()
    ):
        rule = _rule(name, value, must_be_finite=is_ours or is_torchs)
        if rule:
            yield f"{path}.init_args.{name} must be {rule}, got {value}"


def _rule(name: str, value: Any, *, must_be_finite: bool) -> str | None:
    """Return what a value has to be and is not; None if it is fine."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if must_be_finite and not math.isfinite(value):
        return "a finite number"
    if name in _AT_LEAST_ZERO and value < 0:
        return "at least 0"
    return "at least 1" if name in _AT_LEAST_ONE and value < 1 else None
