"""The folder of a run, with its configuration, checkpoints, tables and logs; and the search for runs.

The folder is ``save_dir/name/version`` of the first logger, as `ModelCheckpoint` uses it, so that no two
runs share a folder. (``trainer.log_dir`` is the same folder for all runs of W&B.)

A run is a folder with ``config.yaml``, its whole configuration, and checkpoints. ``ckpt_path: last``
means the newest run of the same configuration, at most two folders below the loggers' folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import LOADER
from fl_lightning.federation.checkpoints.files import LAST

CHECKPOINTS = "checkpoints"


def run_folder(trainer: Trainer) -> str:
    """Return a run's folder, the same in all processes; every process must call this."""
    return str(trainer.strategy.broadcast(own_run_folder(trainer)))


def own_run_folder(trainer: Trainer) -> str:
    """Return a run's folder as this process knows it; only the first process is sure of the version in its name.

    Example:
        >>> own_run_folder(Trainer(logger=CSVLogger("runs", "a", version=3), accelerator="cpu"))
        'runs/a/version_3'
    """
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    if isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return logger.log_dir
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return str(Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version))


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Return the folders of a Trainer's checkpoints; none if it saves none."""
    usual = str(Path(own_run_folder(trainer), CHECKPOINTS))
    savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return list(dict.fromkeys(Path(saver.dirpath or usual) for saver in savers))


CONFIG = "config.yaml"
# Options that may differ when a run is resumed.
_FREE = (
    *(
        "ckpt_path",
        "config",
        "num_threads",
        "report",
        "resume_changed",
        "test_after_fit",
        "verbose",
    ),
    *("return_predictions", "weights_only", "log_level"),
    *("trainer.accelerator", "trainer.barebones", "trainer.default_root_dir", "trainer.devices"),
    *("trainer.enable_model_summary", "trainer.enable_progress_bar", "trainer.fast_dev_run"),
    *("trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.min_epochs"),
    *("trainer.min_steps", "trainer.num_nodes", "trainer.num_sanity_val_steps"),
    *("trainer.profiler", "trainer.strategy", "trainer.plugins"),
)
_PLACES = ("version", "id")  # of a logger: they name the run
_MOST_SHOWN = 8


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run on disk that can be resumed: its folder, checkpoint and configuration."""

    folder: Path  # the folder of the run
    checkpoint: Path  # the checkpoint to resume from
    config: dict[str, Any]  # the configuration with which it was last started or resumed


def earlier_runs(root: Path) -> Iterator[EarlierRun]:
    """Yield the resumable runs (with a checkpoint) below a folder, newest first."""
    found = [*root.glob(f"*/*/{CONFIG}"), *root.glob(f"*/{CONFIG}")]
    seen: set[Path] = set()
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        run = run_in(path.parent)
        # of runs with one folder of checkpoints, the newest has written there
        if run is not None and run.checkpoint.resolve() not in seen:
            seen.add(run.checkpoint.resolve())
            yield run


def run_in(folder: Path) -> EarlierRun | None:
    """Return the run in a folder; None if the folder has no run with a checkpoint."""
    try:
        config = yaml.load((folder / CONFIG).read_text(), LOADER)
    except (OSError, yaml.YAMLError):
        return None
    if not isinstance(config, dict):
        return None
    for place in [*_own_folders(config), folder / CHECKPOINTS]:
        if (checkpoint := newest_checkpoint(place)) is not None:
            return EarlierRun(folder, checkpoint, config)
    return None


def run_of(checkpoint: Path) -> EarlierRun | None:
    """Return the run that wrote a checkpoint, None if that is unknown."""
    run = run_in(checkpoint.parent.parent)
    return None if run is None else EarlierRun(run.folder, checkpoint, run.config)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest ``last*.ckpt`` in a folder, else the newest checkpoint; None if there is none."""
    by_time = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    named = [path for path in by_time if path.name.startswith(Path(LAST).stem)]
    return next(reversed(named or by_time), None)


def differences(then: Any, now: Any, sections: Iterable[str]) -> list[str]:
    """Describe where two configurations differ in the given sections: one text per option."""
    then, now = (
        {key: value for part in sections for key, value in _leaves(part, given.get(part))}
        for given in (then, now)
    )
    found = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)]
    # if a class differs, so do all of its options
    other = [key.removesuffix("class_path") for key in found if key.endswith(".class_path")]
    return [
        f"{key} ({_shown(then, key)} there, {_shown(now, key)} here)"
        for key in found
        if not any(
            key.startswith((f"{prefix}init_args", f"{prefix}dict_kwargs")) for prefix in other
        )
    ]


def _shown(config: Mapping[str, Any], key: str) -> str:
    return "nothing" if key not in config else str(config[key]) or "''"


def choose(
    root: Path, config: Mapping[str, Any], sections: Sequence[str], *, changed: bool
) -> EarlierRun:
    """Return the newest run with this configuration; with ``changed``, the most similar run if none has it.

    Raises:
        ConfigurationError: if there is no such run.
    """
    closest: tuple[EarlierRun, list[str]] | None = None
    for run in earlier_runs(root):
        found = differences(run.config, config, sections)
        if not found:
            return run
        if closest is None or len(found) < len(closest[1]):
            closest = run, found
    if closest is None:
        raise ConfigurationError(
            f"ckpt_path: last, but below {root.resolve()} there is no run with a checkpoint: start without "
            "ckpt_path, or give the path of a .ckpt file"
        )
    if not changed:
        refuse(*closest)
    return closest[0]


def refuse(run: EarlierRun, found: Sequence[str]) -> None:
    """Raise, naming the differences, if a run is to be resumed with another configuration."""
    if not found:
        return
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    raise ConfigurationError(
        f"ckpt_path: the run in {run.folder} has another configuration: "
        f"{'; '.join(found[:_MOST_SHOWN])}{more}. Give the options of that run, or start without "
        "ckpt_path; --resume_changed true resumes with the new options"
    )


def _own_folders(config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders that a configuration sets for checkpoints (``dirpath`` of its callbacks)."""
    callbacks = (config.get("trainer") or {}).get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if dirpath := (callback.get("init_args") or {}).get("dirpath"):
            yield Path(dirpath)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in _FREE or (key.startswith("trainer.logger") and key.split(".")[-1] in _PLACES):
        return
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(f"{key}.{number}", inner)
    elif value is not None:  # options unknown to an older version do not count
        yield key, value
