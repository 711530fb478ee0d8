"""The loggers of a run that is compared: one of the comparison's own, and those of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from fl_lightning.experiments.plan import PlannedRun

_OWN = "lightning.pytorch.loggers.TensorBoardLogger"
_NAME = {"WandbLogger": "name", "MLFlowLogger": "run_name", "CometLogger": "name"}


def run_loggers(run: PlannedRun) -> list[dict[str, Any]]:
    """Return the loggers of a run as its configuration would name them.

    First a TensorBoard logger in the run's folder, from which the comparison reads; in its place no other
    one. The user's others stay, with the run's name and folder where they have such options.
    """
    place = {
        "save_dir": str(run.folder.parent.parent),
        "name": run.folder.parent.name,
        "version": run.folder.name,
    }
    own = {"class_path": _OWN, "init_args": {**place, "default_hp_metric": False}}
    given = yaml.safe_load(run.configuration)["trainer"].get("logger")
    listed = given if isinstance(given, list) else [given]
    others = [each for each in listed if isinstance(each, Mapping) and "class_path" in each]
    return [own, *(_placed(each, run, place) for each in others if _kind(each) != _kind(own))]


def _kind(logger: Mapping[str, Any]) -> str:
    return str(logger["class_path"]).rpartition(".")[-1]


def _placed(logger: Mapping[str, Any], run: PlannedRun, place: Mapping[str, str]) -> dict[str, Any]:
    """Return a logger of the user's as that of one run."""
    kind, options = _kind(logger), dict(logger.get("init_args") or {})
    if kind == "CSVLogger":
        options |= place
    if kind == "WandbLogger":
        options["save_dir"] = str(run.folder)
    if kind in _NAME:
        options[_NAME[kind]] = f"{run.variant.folder}-seed_{run.seed}"
    return {**logger, "init_args": options}
