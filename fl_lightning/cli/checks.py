"""Checks of option values that the parser, Lightning and PyTorch accept although they cannot work.

Examples are a learning rate of NaN, or a schedule with a step of 0 rounds: the model would become NaN, or the run
would end some rounds later with a division by zero. Classes of this package check their own options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import Namespace, dict_to_namespace
from lightning.pytorch import Callback
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.core.errors import ConfigurationError, check_range, raise_together

_OF_TRAINER = {
    **dict.fromkeys(("min_epochs", "min_steps", "log_every_n_steps"), "at least 0"),
    "check_val_every_n_epoch": "at least 1",
    "num_sanity_val_steps": "at least -1",
    "val_check_interval": "above 0",
    "gradient_clip_val": "at least 0 and finite",
}
_OF_PYTORCH = {
    **dict.fromkeys(("lr", "min_lr", "lr_decay", "eta_min", "alpha"), "at least 0"),
    **dict.fromkeys(("eps", "weight_decay", "momentum", "patience"), "at least 0"),
    **dict.fromkeys(("step_size", "T_max", "T_0", "T_mult", "total_iters", "epochs"), "at least 1"),
}


def specs(node: Any, path: str = "") -> Iterator[tuple[str, Namespace]]:
    """Yield path and options of every class and option block in a configuration; inner blocks come first."""
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
    """Return whether a configuration's value is a mapping with ``class_path``, i.e. a class to build."""
    return isinstance(value, dict | Namespace) and isinstance(value.get("class_path"), str)


def imported(class_path: str) -> Any:
    """Import a class or function by its dotted path; None if it does not exist."""
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def check_values(configuration: Any) -> None:
    """Check that Trainer options, seeds, and options of optimizers, schedulers and callbacks are in their ranges.

    Raises:
        ConfigurationError: naming the path of every option with a wrong value.
    """
    trainer = configuration.get("trainer")
    if not isinstance(trainer, Namespace | Mapping):
        raise ConfigurationError(
            "trainer must be a mapping of options, such as max_epochs: 10, got "
            f"{'null' if trainer is None else trainer}"
        )
    checks: list[Callable[[], None]] = [
        partial(_check_number, f"trainer.{name}", trainer.get(name), allowed)
        for name, allowed in _OF_TRAINER.items()
    ]
    for path, spec in specs(configuration):
        checks += _checks_of_class(path, spec)
    seed, folder = configuration.get("seed_everything"), trainer.get("default_root_dir") or "."
    raise_together(
        partial(_check_number, "seed_everything", seed, f"from 0 to {2**32 - 1}", ", or false"),
        lambda: _check_time(trainer.get("max_time")),
        lambda: check_writable("trainer.default_root_dir", Path(folder), is_folder=True),
        *checks,
    )


def _check_time(value: Any) -> None:
    is_text = isinstance(value, str) and re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value)
    if value is None or is_text or isinstance(value, timedelta):
        return
    with suppress(TypeError, ValueError, OverflowError):
        if timedelta(**value) > timedelta(0):
            return
    raise ConfigurationError(
        "trainer.max_time must be a time such as 00:12:00:00 (days, hours, minutes, seconds), or a "
        f"mapping such as hours: 2, got {value}"
    )


def check_writable(option: str, path: Path, *, is_folder: bool = False) -> None:
    """Raise ConfigurationError if a file or folder cannot be written, without writing it.

    Args:
        option: name of the option, for the message.
        path: path of the file or folder; folders above it may be missing.
        is_folder: whether the path is that of a folder.
    """
    folder, reason = path if is_folder else path.parent, None
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    if path.is_dir() and not is_folder:
        reason = "it is a folder"
    elif not nearest.is_dir():
        reason = f"{nearest} is a file"
    else:
        try:
            with TemporaryDirectory(dir=nearest):
                pass
        except OSError as error:
            reason = error.strerror
    if reason is not None:
        raise ConfigurationError(f"{option}: {path} cannot be written: {reason}")


def _check_number(what: str, value: Any, allowed: str, advice: str = "") -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        check_range(what, value, allowed, advice)


def _checks_of_class(path: str, spec: Any) -> Iterator[Callable[[], None]]:
    options = spec.get("init_args") or spec
    class_path = spec.get("class_path") or "fl_lightning"
    # for a user's own class, -1 or an infinite number may have a meaning
    is_ours, is_torchs = class_path.startswith("fl_lightning"), class_path.startswith("torch.")
    if is_ours:
        inside = path if options is spec else f"{path}.init_args"
        allowed = f"a whole number from 0 to {2**64 - 1}"
        yield partial(_check_number, f"{inside}.seed".lstrip("."), options.get("seed"), allowed)
    kind = imported(spec.get("class_path") or "")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer | LRScheduler | Callback)):
        return
    if is_ours or is_torchs or "lightning." in class_path:
        must_be_finite = is_ours or is_torchs
        for name, value in vars(options).items():
            allowed = _OF_PYTORCH.get(name, "a number")
            allowed += " and finite" if must_be_finite else ""
            yield partial(_check_number, f"{path}.init_args.{name}", value, allowed)
