"""Checks beside the parser: of values without a meaning that it accepts, and of refusals without a reason.

Options of the Trainer that Lightning refuses with a traceback, or takes though they mean nothing. Seeds,
and options of PyTorch's optimizers and schedules that PyTorch takes without a look: a learning rate that is
no number, or a step of 0 rounds, ends in a model of NaNs or in a division by zero, some rounds later.
Classes of this package check their own options. Variables of the environment for options inside classes.

The parser asks protocols for methods of the same names and annotations, and bases for nothing abstract.
Of a class that is refused it says neither which method is missing nor how it must be written:
`what_is_missing` does.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch
from jsonargparse import Namespace, dict_to_namespace
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import get_protocol_members, is_protocol

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
_MOST_SEED = 2**32 - 1
_ON_GPUS = ("fsdp", "deepspeed", "xla")
_PROFILERS = ("simple", "advanced", "pytorch", "xla")
_TIME = re.compile(r"\d+:\d\d:\d\d:\d\d")

# a value -> what it must be; None if it is fine
Rule = Callable[[Any], str | None]


def specs(node: Any, path: str = "") -> Iterator[tuple[str, Namespace]]:
    """Yield the namespaces of a configuration and their paths, inner ones first."""
    if isinstance(node, list):
        for number, entry in enumerate(node):
            yield from specs(entry, f"{path}[{number}]")
    if is_spec(node):
        node = dict_to_namespace(dict(node))
    if not isinstance(node, Namespace):
        return
    for name, value in vars(node).items():
        yield from specs(value, f"{path}.{name}".lstrip("."))
    if not path.endswith(".init_args"):
        yield path, node


def is_spec(value: Any) -> bool:
    """Return whether a value describes an object, by its class and options."""
    return isinstance(value, dict | Namespace) and isinstance(value.get("class_path"), str)


def imported(class_path: str) -> Any:
    """Return the class or function of an import path; None if there is none."""
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def check_environment(parser: Any, environ: Mapping[str, str]) -> None:
    """Refuse variables that stand for an option inside a class: the parser reads whole classes only.

    Raises:
        ConfigurationError: with what to set instead.
    """
    dests = [action.dest for action in parser._actions]
    known = {f"{parser.env_prefix}_{dest}".upper().replace(".", "__"): dest for dest in dests}
    for name in sorted(environ.keys() - known):
        owner = next((each for each in known if name.startswith(f"{each}__")), None)
        if owner is not None:
            value = environ[name]
            for option in reversed(name.removeprefix(f"{owner}__").lower().split("__")):
                value = f"{{{option}: {value}}}"
            raise ConfigurationError(
                f"{name} is not read: {known[owner]} has no variable of this name. If it is a class, "
                f"give all its options in one: {owner}='{value}'"
            )


def check_trainer(configuration: Any) -> None:
    """Refuse options of the Trainer, and the seed of everything.

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
    problems = [*_trainer_problems(options)]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _trainer_problems(options: Any) -> Iterator[str]:
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


def check_ranges(configuration: Any) -> None:
    """Refuse values that mean nothing.

    Raises:
        ConfigurationError: naming the option by its path in the YAML.
    """
    problems = [
        problem for path, spec in specs(configuration) for problem in _range_problems(path, spec)
    ]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _range_problems(path: str, spec: Any) -> Iterator[str]:
    options = spec.get("init_args") or spec
    class_path = spec.get("class_path") or "fl_lightning"
    # a user's own class may mean something by -1, or by an infinite number
    is_ours, is_torchs = class_path.startswith("fl_lightning"), class_path.startswith("torch.")
    seed = options.get("seed") if is_ours else None
    if isinstance(seed, int) and not 0 <= seed < 2**64:
        inside = ".init_args" if options is not spec else ""
        yield f"{path}{inside}.seed must be a whole number from 0 to 2^64 - 1, got {seed}"
    kind = imported(spec.get("class_path") or "")
    if not (isinstance(kind, type) and issubclass(kind, (Optimizer, LRScheduler, Callback))):
        return
    for name, value in (
        vars(options).items() if is_ours or is_torchs or "lightning." in class_path else ()
    ):
        rule = _needed(name, value, must_be_finite=is_ours or is_torchs)
        if rule:
            yield f"{path}.init_args.{name} must be {rule}, got {value}"


def _needed(name: str, value: Any, *, must_be_finite: bool) -> str | None:
    """Rule that a value breaks, in words; None if it is fine."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if must_be_finite and not math.isfinite(value):
        return "a finite number"
    if name in _AT_LEAST_ZERO and value < 0:
        return "at least 0"
    return "at least 1" if name in _AT_LEAST_ONE and value < 1 else None


# the parser leaves out a path that is the whole value
_UNLIKE = re.compile(
    r"(?:\"(?P<path>[\w.]+)\" is not a subclass or implementer of|does not implement) "
    r"protocol \{?(?P<protocols>[\w,]+)"
)
_ABSTRACT = "Expected an instantiatable class, but "
# of a value: a class's path, or a mapping that names it
_GIVEN = re.compile(r"(?:.*class_path['\"]?[=:] ?['\"])?(?P<path>[\w.]+)")
# where protocols that users write classes for are exported
_PACKAGES = ("fl_lightning.data", "fl_lightning.sparsity", "fl_lightning.updates")


def what_is_missing(reason: str, given: str) -> str | None:
    """Methods that a class lacks for a protocol, in words; None if it was refused for another reason.

    A class without a single method of the protocol was not meant to be one.

    Example:
        >>> said = "Import path fl_lightning.Mean does not implement protocol Partition"
        >>> what_is_missing(said, "fl_lightning.Mean") is None
        True
    """
    unlike, named = _UNLIKE.search(reason), _GIVEN.match(given)
    path = (unlike and unlike["path"]) or (named and named["path"])
    own = imported(path or "")
    if own is None:
        return None
    if reason.startswith(_ABSTRACT) and inspect.isabstract(own):
        names = ", ".join(sorted(own.__abstractmethods__))
        return f"{path} is unfinished, it lacks {names}: write a class that has it"
    for name in unlike["protocols"].split(",") if unlike else ():
        protocol = _protocol(name)
        if protocol is None or not any(hasattr(own, member) for member in _members(protocol)):
            continue
        if written := "; ".join(_unlike(own, protocol)):
            return f"{path} is a {name} once it has, annotations and all: {written}"
    return None


def _protocol(name: str) -> type | None:
    for package in _PACKAGES:
        found: Any = getattr(import_module(package), name, None)
        if inspect.isclass(found) and is_protocol(found):
            return found
    return None


def _members(protocol: type) -> list[str]:
    members = get_protocol_members(protocol)
    return [name for name in vars(protocol) if name in members]


def _unlike(own: Any, protocol: type) -> Iterator[str]:
    for name in _members(protocol):
        wanted, has = getattr(protocol, name), getattr(own, name, None)
        if isinstance(wanted, property):
            if has is None:
                yield f"a property {name}"
        elif not inspect.isfunction(has) or not _is_like(has, wanted):
            yield f"{name}{inspect.signature(wanted)}".replace("'", "")


def _is_like(own: Any, wanted: Any) -> bool:
    try:
        hints, known = get_type_hints(own), get_type_hints(wanted)
    except NameError:
        return False
    names = list(inspect.signature(own).parameters), list(inspect.signature(wanted).parameters)
    return names[0] == names[1] and all(
        hint == Any or hints.get(name) == hint for name, hint in known.items()
    )
