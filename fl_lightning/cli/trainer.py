"""Options of the Trainer that Lightning refuses with a traceback, or takes though they mean nothing."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from fl_lightning.core.errors import ConfigurationError

_MOST_SEED = 2**32 - 1
_ON_GPUS = ("fsdp", "deepspeed", "xla")
_PROFILERS = ("simple", "advanced", "pytorch", "xla")
_TIME = re.compile(r"\d+:\d\d:\d\d:\d\d")

# a value -> what it must be; None if it is fine
Rule = Callable[[Any], str | None]


def check_trainer(configuration: Any) -> None:
    """Refuse options of the Trainer, and the seed of everything.

    Args:
        configuration: of a command, parsed.

    Raises:
        ConfigurationError: naming every such option by its path in the YAML.
    """
    seed = configuration.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed <= _MOST_SEED:
        raise ConfigurationError(
            f"seed_everything must be a whole number from 0 to {_MOST_SEED}, or false, got {seed}"
        )
    options = configuration.get("trainer")
    if options is None:
        return
    if not isinstance(options, (Namespace, Mapping)):
        raise ConfigurationError(
            f"trainer must be a mapping of options, such as max_epochs: 10, got {options}"
        )
    problems = [*_problems(options)]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _problems(options: Any) -> Iterator[str]:
    for name, rule in _RULES.items():
        value = options.get(name)
        if value is not None and (needed := rule(value)):
            shown = value if value != "" else "an empty text"
            yield f"trainer.{name} must be {needed}, got {shown}"
    callbacks = options.get("callbacks") or []
    named = [each.get("class_path", "") for each in callbacks if isinstance(each, Namespace)]
    twice = [path for path, n in Counter(named).items() if n > 1 and "MaskCalibration" in path]
    if twice:
        yield "trainer.callbacks must hold one MaskCalibration at most, got 2: one mask is made for all"


def _whole(least: int) -> Rule:
    def rule(value: Any) -> str | None:
        fits = isinstance(value, int) and value >= least
        return None if fits else f"a whole number, at least {least}"

    return rule


def _share_or_count(value: Any) -> str | None:
    fits = value >= 0 if isinstance(value, int) else 0 <= value <= 1
    return None if fits else "a number of batches, at least 0, or a share of them, from 0.0 to 1.0"


def _interval(value: Any) -> str | None:
    if isinstance(value, str):
        return (
            None
            if _TIME.fullmatch(value)
            else "a number of batches, a share, or a time DD:HH:MM:SS"
        )
    if not isinstance(value, (int, float)):
        return None  # a time, which Lightning reads
    fits = value >= 1 if isinstance(value, int) else 0 < value <= 1
    return (
        None if fits else "a number of batches, at least 1, or a share of them, above 0.0 up to 1.0"
    )


def _accelerator(value: Any) -> str | None:
    known = sorted({"auto", "gpu", *AcceleratorRegistry.available_accelerators()})
    if not isinstance(value, str):
        return None
    if value not in known:
        return f"one of {', '.join(known)}"
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    found = any(has.values()) if value == "gpu" else has.get(value, True)
    if not found:
        return "an accelerator that this machine has: set it to cpu or auto"
    return None


def _strategy(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    known = sorted({"auto", *StrategyRegistry.available_strategies()})
    if value not in known:
        return f"one of {', '.join(known)}"
    if value.startswith(_ON_GPUS) and not torch.cuda.is_available():
        return "a strategy for the devices of this machine: leave it out, or set it to auto"
    return None


def _devices(value: Any) -> str | None:
    needed = "auto, -1 for all, a number of devices, at least 1, or a list of different ones"
    if isinstance(value, str):
        parts = value.split(",")
        fits = value in ("auto", "-1") or all(
            part.strip().isdigit() for part in parts if part.strip()
        )
        return None if fits and value.strip() not in ("", "0") else needed
    if isinstance(value, list):
        fits = bool(value) and len(set(value)) == len(value)
        return None if fits and all(isinstance(n, int) and n >= 0 for n in value) else needed
    return None if value == -1 or value >= 1 else needed


def _clip(value: Any) -> str | None:
    return None if 0 <= value < math.inf else "at least 0 and finite, or null for no clipping"


def _time(value: Any) -> str | None:
    needed = (
        "a time such as 00:12:00:00 (days, hours, minutes, seconds), or a mapping such as hours: 2"
    )
    if isinstance(value, str):
        return None if _TIME.fullmatch(value) else needed
    if isinstance(value, Mapping):
        try:
            return None if timedelta(**value) > timedelta(0) else needed
        except TypeError:
            return needed
    return None


def _folder(value: Any) -> str | None:
    folder = Path(value)
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    fits = nearest.is_dir() and os.access(nearest, os.W_OK) and not nearest.is_relative_to("/proc")
    return None if fits else "a folder that can be written to"


def _one_of(*names: str) -> Rule:
    return lambda value: (
        None if value in names or not isinstance(value, str) else f"one of {', '.join(names)}"
    )


_RULES: dict[str, Rule] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "devices": _devices,
    "num_nodes": _whole(1),
    "fast_dev_run": _whole(0),
    "max_epochs": _whole(-1),
    "min_epochs": _whole(0),
    "max_steps": _whole(-1),
    "min_steps": _whole(0),
    "max_time": _time,
    "limit_train_batches": _share_or_count,
    "limit_val_batches": _share_or_count,
    "limit_test_batches": _share_or_count,
    "limit_predict_batches": _share_or_count,
    "overfit_batches": _share_or_count,
    "val_check_interval": _interval,
    "check_val_every_n_epoch": _whole(1),
    "num_sanity_val_steps": _whole(-1),
    "log_every_n_steps": _whole(0),
    "reload_dataloaders_every_n_epochs": _whole(0),
    "gradient_clip_val": _clip,
    "gradient_clip_algorithm": _one_of("value", "norm"),
    "profiler": _one_of(*_PROFILERS),
    "default_root_dir": _folder,
}
