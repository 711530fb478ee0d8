"""The configuration that trains a network that a search has found.

    model                              `ImageClassifier` with a `Network` of the architecture
    data, federation, trainer, seed    those of the search, without what only a search needs

It is complete: ``fl-lightning fit --config FILE`` trains. As a layer over another configuration it
brings all of its own parts along. Where the search had no configuration it is the model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.named_spaces import description
from fl_lightning.nas.spaces.space import Architecture

NETWORK = "fl_lightning.nas.Network"
_KEPT = ("seed_everything", "num_threads", "data", "federation", "trainer")
_OF_MODEL = ("label_smoothing", "optimizer", "schedule")
# what a layer must say, or the configuration below it goes on saying other things
_PLAIN_SGD = {
    "class_path": "torch.optim.SGD",
    "init_args": {
        "lr": 0.01,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    },
}
_NO_NAMED_NETWORK = {
    "pretrained": False,
    "checkpoint_path": None,
    "drop_rate": 0.0,
    "network_kwargs": None,
}
_ONLY_WHILE_SEARCHING = {"alpha", "beta", "kept_state", "baseline"}  # names in a `Supernet`


def retraining(
    architecture: Architecture,
    shape: Mapping[str, Any],
    *,
    image_size: int,
    weights: str | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration.

    Args:
        architecture: that was found.
        shape: what else `Network` takes: num_classes, in_channels, in spaces of cells channels and cells.
        image_size: height and width in pixels.
        weights: a checkpoint to begin with; None for fresh weights.
        run: the search's own configuration.
    """
    network = {
        "space": _short(description(architecture.space)),
        "architecture": str(architecture),
        **shape,
        **({} if weights is None else {"weights": weights}),
    }
    searched = ((run or {}).get("model") or {}).get("init_args") or {}
    model = {
        "network": {"class_path": NETWORK, "init_args": network},
        "num_classes": shape["num_classes"],
        "in_chans": shape["in_channels"],
        "image_size": image_size,
        **(_NO_NAMED_NETWORK if run is None else {}),
        "optimizer": _PLAIN_SGD,
        **{key: searched[key] for key in _OF_MODEL if searched.get(key) is not None},
    }
    found = {"model": {"class_path": "fl_lightning.ImageClassifier", "init_args": model}}
    kept = {key: deepcopy(run[key]) for key in _KEPT if run is not None and key in run}
    return {**found, **_without_search(kept)}


def architecture_in(path: str) -> str:
    """Return the architecture that a file of a search names: a configuration, or a network's arguments.

    Raises:
        ConfigurationError: if the file cannot be read or names none.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"architecture {path}: {error}") from error
    for key in ("model", "init_args", "network", "init_args"):
        content = content.get(key, content) if isinstance(content, dict) else content
    found = content.get("architecture") if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise ConfigurationError(
            f"architecture {path}: the file has no line 'architecture: …', as those that a search "
            "leaves have"
        )
    return found


def _without_search(run: dict[str, Any]) -> dict[str, Any]:
    """Leave out, in place, what a fit of one network cannot use."""
    data = run.get("data") or {}
    if "search_fraction" in (data.get("init_args") or {}):
        data["init_args"]["search_fraction"] = 0.0
    federation = run.get("federation") or {}
    kept = [p for p in federation.get("client_state") or () if p not in _ONLY_WHILE_SEARCHING]
    if federation.get("client_state"):
        federation["client_state"] = kept or None
    personal = ((run.get("federation") or {}).get("personal") or {}).get("init_args") or {}
    if _ONLY_WHILE_SEARCHING & set(personal.get("parameters") or ()):
        run["federation"]["personal"] = None
    trainer = run.get("trainer") or {}
    callbacks = trainer.get("callbacks")
    if isinstance(callbacks, list):
        of_search = [
            c for c in callbacks if str(c.get("class_path")).startswith("fl_lightning.nas.")
        ]
        trainer["callbacks"] = [c for c in callbacks if c not in of_search] or None
    return run


def _short(space: dict[str, Any]) -> dict[str, Any]:
    """Name a class of ours by the room that exports it, and leave out empty settings."""
    module, _, name = space["class_path"].rpartition(".")
    path = (
        f"fl_lightning.nas.{name}" if module.startswith("fl_lightning.nas.") else f"{module}.{name}"
    )
    arguments = {
        key: _short(value) if isinstance(value, dict) and "class_path" in value else value
        for key, value in space["init_args"].items()
    }
    return {"class_path": path, **({"init_args": arguments} if arguments else {})}
