"""Resuming a run from the command line: its checkpoint, configuration, folder and tables.

``ckpt_path: last`` is the last checkpoint of the newest run with the same configuration; a path of a
checkpoint belongs to the run that wrote it. A resumed fit writes to the folder of its run.
"""

from __future__ import annotations

import csv
import os
import secrets
import warnings
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.checkpoints.files import remove_unfinished
from fl_lightning.federation.checkpoints.run_folder import (
    EarlierRun,
    choose,
    differences,
    refuse,
    run_of,
)

# Copy of a table of metrics while a resumed run begins a new one.
_KEPT = ".metrics.csv.kept"
# Folder in which Lightning's default logger puts runs.
_DEFAULT_NAME = "lightning_logs"
_EVALUATED = ("seed_everything", "model", "data", "federation")
_FITTED = (*_EVALUATED, "trainer")


def find_run(config: Any, plain: Mapping[str, Any], *, is_fit: bool) -> EarlierRun | None:
    """Find the run to which ``ckpt_path`` (last, best or a path) refers, and set ``ckpt_path`` to its checkpoint.

    Raises:
        ConfigurationError: if there is no such run or checkpoint, or its configuration differs.
    """
    given = config.get("ckpt_path")
    if given is None or "://" in str(given) or str(given).split(":")[0] in ("hpc", "registry"):
        return None
    if not str(given).strip():
        raise ConfigurationError("ckpt_path is empty: give the path of a .ckpt file, last, or null")
    sections = _FITTED if is_fit else _EVALUATED
    run = _named(str(given), config, plain, sections, is_fit=is_fit)
    checkpoint = Path(str(given)) if run is None else run.checkpoint
    check_checkpoint(checkpoint)
    config["ckpt_path"] = str(checkpoint)
    return run


def _named(
    given: str, config: Any, plain: Mapping[str, Any], sections: tuple[str, ...], *, is_fit: bool
) -> EarlierRun | None:
    if given == "best" and is_fit:
        raise ConfigurationError(
            "ckpt_path: a fit resumes from last, or from a path, not from best"
        )
    if given not in ("last", "best"):
        run = run_of(Path(given))
        if run is not None and is_fit and not config.resume_changed:
            refuse(run, differences(run.config, plain, sections))
        return run
    options: Any = next((logger.init_args for logger in _loggers(config)), {})
    root = options.get("save_dir") or config.trainer.get("default_root_dir") or "."
    run = choose(Path(root), plain, sections, changed=config.resume_changed)
    if given == "last":
        return run
    check_checkpoint(run.checkpoint)
    best = best_of(run.checkpoint)
    if best is None:
        raise ConfigurationError(
            f"ckpt_path: best, but the run in {run.folder} keeps no best checkpoint: its "
            "configuration has no ModelCheckpoint with a monitor. Give last, or a path"
        )
    return EarlierRun(run.folder, best, run.config)


def resume_loggers(config: Any, run: EarlierRun | None) -> None:
    """Make loggers of online services continue the resumed run; W&B's logger gets a name for a new run.

    `take_folders` sets the folders of other loggers. Folders are no part of the configuration, because another
    run with the same configuration has another folder.
    """
    before = [] if run is None else _listed((run.config.get("trainer") or {}).get("logger"))
    for number, logger in enumerate(_loggers(config)):
        kind, options = str(logger.class_path).rpartition(".")[2], logger.init_args
        if options.get("version") is not None or options.get("id") is not None:
            continue
        if kind in ("TensorBoardLogger", "CSVLogger"):
            continue
        if number < len(before) and isinstance(before[number], dict):
            known = before[number].get("init_args") or {}
            if (version := known.get("version") or known.get("id")) is not None:
                options["version"] = version
        if kind == "WandbLogger" and options.get("version") is None:
            options["version"] = f"w{secrets.token_hex(4)}"  # 12e45678 is a number to YAML


def set_folder(trainer: Any, run: EarlierRun | None) -> None:
    """Set the folder of a fit without a configured logger: that of the resumed run, or a new one."""
    logger, root = trainer.get("logger"), trainer.get("default_root_dir") or Path.cwd()
    if logger is False:
        if run is not None:
            trainer["default_root_dir"] = str(run.folder)
        elif not getattr(rank_zero_only, "rank", 0):  # the first process chooses the folder
            trainer["default_root_dir"] = str(_new_folder(Path(root, _DEFAULT_NAME)))
    elif logger in (None, True) and run is not None and run.folder.parent.name == _DEFAULT_NAME:
        trainer["logger"] = TensorBoardLogger(
            run.folder.parent.parent, name=_DEFAULT_NAME, version=run.folder.name
        )


def clean_up_after(run: EarlierRun) -> None:
    """Remove half-written files that a killed run has left."""
    remove_unfinished(run.checkpoint.parent)
    remove_unfinished(run.folder)


def take_folders(trainer: Trainer, run: EarlierRun | None) -> None:
    """Make loggers of a resumed run write to its folder; create the folders of a new run.

    Lightning's loggers look for a free number when they are first used, so that two runs may use the same folder.
    """
    taken = {} if run is None else {run.folder.parent.resolve(): run.folder.name}
    for logger in trainer.loggers:
        if not isinstance(logger, (TensorBoardLogger, CSVLogger)) or "://" in logger.root_dir:
            continue
        if logger._version is None:
            parent = Path(os.path.expandvars(logger.root_dir)).expanduser().resolve()
            if parent not in taken and trainer.is_global_zero:
                taken[parent] = _new_folder(parent).name
            logger._version = taken.get(parent)  # one run's loggers share a folder


def _new_folder(parent: Path) -> Path:
    """Make a folder ``version_N`` that no other run has."""
    taken = [path.name.removeprefix("version_") for path in parent.glob("version_*")]
    for number in count(1 + max((int(name) for name in taken if name.isdecimal()), default=-1)):
        folder = parent / f"version_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # another run has just begun
            continue
        return folder
    raise AssertionError


def _loggers(config: Any) -> list[Any]:
    """Return the loggers that a configuration names."""
    return [entry for entry in _listed(config.trainer.get("logger")) if hasattr(entry, "init_args")]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def keep_rows(trainer: Trainer, step: int) -> None:
    """Keep the rows of ``metrics.csv`` before a given step when a run resumes; Lightning would delete them.

    `lightning.pytorch.loggers.CSVLogger` deletes ``metrics.csv`` of a folder in which it begins.
    To be called by the first process alone.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            _keep(logger, step)


def _keep(logger: CSVLogger, step: int) -> None:
    path, kept = Path(logger.log_dir, "metrics.csv"), Path(logger.log_dir, _KEPT)
    if path.exists() and not kept.exists():  # else an earlier run was killed here
        os.replace(path, kept)
    with warnings.catch_warnings():  # about files that would be deleted
        warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
        writer = logger.experiment
    if not kept.exists():
        return
    with kept.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [
            row for row in reader if (row.get("step") or "").isdecimal() and int(row["step"]) < step
        ]
        writer.metrics_keys = list(reader.fieldnames or [])
    unfinished = path.with_name(".metrics.csv.unfinished")
    with unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, writer.metrics_keys)
        table.writeheader()
        table.writerows(rows)
    os.replace(unfinished, path)
    kept.unlink()


def check_checkpoint(path: Path) -> int:
    """Return a checkpoint's ``global_step``; raise if the file is not a checkpoint."""
    problem, checkpoint = _read(path)
    if problem is None:
        return int(checkpoint.get("global_step", 0))
    raise ConfigurationError(f"ckpt_path: {path} {problem}. Give the path of a .ckpt file, or last")


def best_of(last: Path) -> Path | None:
    """Return the best checkpoint of a run, given the last one; None if the run kept none."""
    callbacks = _read(last)[1].get("callbacks", {})
    for state in callbacks.values():
        if isinstance(state, dict) and state.get("monitor") and state.get("best_model_path"):
            best = Path(state["best_model_path"])
            beside = last.with_name(best.name)  # where the run's folder has been moved since
            return next((path for path in (beside, best) if path.exists()), None)
    return None


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Read a checkpoint; return (reason why the file is not a checkpoint, or None; its content)."""
    if path.is_dir():
        return "is a folder, not a checkpoint", {}
    if not path.exists():
        return "does not exist", {}
    if path.stat().st_size == 0:
        return "is empty", {}
    try:
        # memory-mapped: only the tensors that are used are read
        checkpoint = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
    except Exception as error:  # noqa: BLE001 - pickle raises whatever the bytes lead to
        return _explained(error, path), {}
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        return "is not a checkpoint of Lightning: it has no state_dict", {}
    return None, checkpoint


def _explained(error: Exception, path: Path) -> str | None:
    if isinstance(error, PermissionError):
        return "cannot be read: you lack the permission"
    if isinstance(error, UnpicklingError) and is_zipfile(path):
        return None  # it holds classes of the user's own: Lightning's error says what to do
    return "is not a checkpoint of Lightning, or is damaged"
