"""Network of one architecture, its initial weights, and the configuration that trains it.

Initial weights are random, or those of a supernet's checkpoint or of a checkpoint of the same network.
`retraining` returns the configuration that trains the result of a search:

    model                              `ImageClassifier` with a `Network` of the architecture
    data, federation, trainer, seed    those of the search, without options that only a search needs

A search that was started in Python has no configuration: then it contains the model alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.core.yaml_files import read
from fl_lightning.models.checkpoints import read_tensors
from fl_lightning.nas.spaces import subnetwork
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.named import description
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, Networks


@final
class Network(nn.Module):
    """Network of one given architecture, from images to logits; it is the ``network`` of an `ImageClassifier`.

    Args:
        space: space of cells or of sizes.
        architecture: string of the architecture; or names of the chosen options, one per decision, as in a
            sweep; or path of a YAML file that a search wrote (architecture.yaml, retrain.yaml, best.yaml),
            of which only the architecture is read.
        num_classes: length of the output.
        in_channels: channels of the images.
        channels: channels of the first cells, in a space of cells; the default of the space if None.
        cells: number of cells, in a space of cells; the default of the space if None.
        weights: path of a checkpoint with the initial weights: of a `OneShot` over the same space of sizes,
            or of a run that trained this network; random weights if None.
        new_head: whether the classifier has random initial weights nevertheless, e.g. for other classes;
            the checkpoint may then have another number of classes.

    Raises:
        ConfigurationError: for an architecture of another space, or an option that the space does not have.

    Example:
        >>> import torch
        >>> from fl_lightning.nas import NASBench201
        >>> cell = "|skip_connect~0|+|none~0|none~1|+|none~0|none~1|nor_conv_1x1~2|"
        >>> net = Network(NASBench201(), cell, num_classes=10, in_channels=1, channels=4, cells=1)
        >>> net(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        space: CellSpace | SizeSpace,
        architecture: str | list[str],
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int | None = None,
        cells: int | None = None,
        weights: str | None = None,
        new_head: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = _chosen(space, architecture)
        sizes = {"channels": channels, "cells": cells}
        given = {name: value for name, value in sizes.items() if value is not None}
        if isinstance(space, SizeSpace) and given:
            raise ConfigurationError(
                f"{next(iter(given))} is for spaces of cells, and {space.name} is a space of sizes: leave it out"
            )
        if new_head and weights is None:
            raise ConfigurationError(
                "new_head: without weights the whole network is new: leave it out, or give weights"
            )
        shape = {"num_classes": num_classes, "in_channels": in_channels, **given}
        self.network = space.build(self.architecture, **shape)
        if weights is not None:
            load_weights(self.network, self.architecture, weights, shape, new_head=new_head)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes)."""
        logits: Tensor = self.network(images)
        return logits


def _chosen(space: CellSpace | SizeSpace, given: str | list[str]) -> Architecture:
    if isinstance(given, str):
        is_file = given.endswith((".yaml", ".yml"))
        return space.parse(architecture_in(given) if is_file else given)
    choices = []
    for decision, option in zip(space.decisions, given, strict=False):
        if option not in decision.options:
            raise ConfigurationError(
                f"architecture: the option of {decision.name} must be one of {', '.join(decision.options)}, got "
                f"{option}"
            )
        choices.append(decision.options.index(option))
    return space.architecture(choices)


# prefixes in checkpoints: the LightningModule and `Network` both have an attribute `network`
_PREFIX = re.compile(r"^(network\.)+")


def load_weights(
    network: nn.Module,
    architecture: Architecture,
    path: str,
    shape: Mapping[str, Any],
    *,
    new_head: bool = False,
) -> None:
    """Load initial weights, in place, from a checkpoint of a supernet or of the same network.

    Batch norm statistics are those of the file, of a supernet those of its largest network: recalibrate
    them, or train further.

    Args:
        network: plain network of the architecture.
        architecture: architecture of the network.
        path: path of the checkpoint.
        shape: arguments of the space's `build`.
        new_head: whether the classifier keeps its current weights.

    Raises:
        ConfigurationError: if the file is missing or has other weights.
    """
    heads = tuple(f"{name}." for name in head_names(network)) if new_head else ()
    named = {_PREFIX.sub("", name): t for name, t in read_tensors(path, "weights").items()}
    tensors = {name: tensor for name, tensor in named.items() if not name.startswith(heads)}
    if _fit(tensors, network, heads):
        network.load_state_dict(tensors, strict=False)
        return
    space = architecture.space
    supernet = space.supernet(**shape) if isinstance(space, SizeSpace) else None
    if supernet is None or not _fit(tensors, supernet, heads):
        raise ConfigurationError(f"weights {path}: {_refusal(architecture, shape)}")
    fresh = {name: t.clone() for name, t in network.state_dict().items() if name.startswith(heads)}
    supernet.load_state_dict(tensors, strict=False)
    subnetwork.copy(supernet, network)
    if new_head:
        network.load_state_dict(fresh, strict=False)


def _refusal(architecture: Architecture, shape: Mapping[str, Any]) -> str:
    space = architecture.space
    settings = ", ".join(f"{name} {value}" for name, value in shape.items())
    what = "not of a trained network of"
    advice = (
        "Weights of a supernet of cells do not fit a single network: leave weights out, and train it from "
        "scratch. "
    )
    if isinstance(space, SizeSpace):
        what, advice = f"neither of a supernet of {space.name} nor of", ""
    return f"they are {what} {architecture} with these settings ({settings}). {advice}For other classes set new_head"


def _fit(tensors: Mapping[str, Tensor], network: nn.Module, heads: tuple[str, ...]) -> bool:
    """True if the tensors have exactly the names and shapes of the network's tensors, classifier excepted."""
    own = {name: t.shape for name, t in network.state_dict().items() if not name.startswith(heads)}
    return own == {name: tensor.shape for name, tensor in tensors.items()}


NETWORK = "fl_lightning.nas.Network"
_KEPT = ("seed_everything", "num_threads", "data", "federation", "trainer")
_OF_MODEL = ("label_smoothing", "optimizer", "schedule")
# all options of SGD, so that none is left from a configuration file given before
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
    networks: Networks,
    *,
    weights: str | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a configuration for ``fl-lightning fit`` that trains a single architecture.

    Args:
        architecture: architecture to train.
        networks: networks of the architecture's space, in the shape to train.
        weights: path of a checkpoint with the initial weights; random weights if None.
        run: configuration of the search; None if there is none.
    """
    network = {
        "space": description(architecture.space),
        "architecture": str(architecture),
        **networks.shape,
        **({} if weights is None else {"weights": weights}),
    }
    searched = ((run or {}).get("model") or {}).get("init_args") or {}
    model = {
        "network": {"class_path": NETWORK, "init_args": network},
        "num_classes": networks.shape["num_classes"],
        "in_chans": networks.shape["in_channels"],
        "image_size": networks.side,
        **(_NO_NAMED_NETWORK if run is None else {}),
        "optimizer": _PLAIN_SGD,
        **{key: searched[key] for key in _OF_MODEL if searched.get(key) is not None},
    }
    found = {"model": {"class_path": "fl_lightning.ImageClassifier", "init_args": model}}
    kept = {key: deepcopy(run[key]) for key in _KEPT if run is not None and key in run}
    return {**found, **_without_search(kept)}


def architecture_in(path: str) -> str:
    """Read the architecture string from a YAML file that a search wrote.

    Raises:
        ConfigurationError: if the file cannot be read, or contains no architecture.
    """
    content: Any = read(Path(path), "architecture ")
    for key in ("model", "init_args", "network", "init_args"):
        content = content.get(key, content) if isinstance(content, dict) else content
    found = content.get("architecture") if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise ConfigurationError(
            f"architecture {path}: the file has no line 'architecture: …': give a file that a search wrote "
            "(architecture.yaml, retrain.yaml, best.yaml), or the architecture itself"
        )
    return found


def _without_search(run: dict[str, Any]) -> dict[str, Any]:
    """Remove, in place, the search's options that training a single network cannot use."""
    data, federation, trainer = (run.get(key) or {} for key in ("data", "federation", "trainer"))
    if "search_fraction" in (data.get("init_args") or {}):
        data["init_args"]["search_fraction"] = 0.0
    if given := federation.get("client_state"):
        federation["client_state"] = [p for p in given if p not in _ONLY_WHILE_SEARCHING] or None
    personal = (federation.get("personal") or {}).get("init_args") or {}
    if _ONLY_WHILE_SEARCHING & set(personal.get("parameters") or ()):
        federation["personal"] = None
    callbacks = trainer.get("callbacks")
    if isinstance(callbacks, list):
        names = [str(callback.get("class_path")) for callback in callbacks]
        pairs = zip(callbacks, names, strict=True)
        kept = [callback for callback, name in pairs if not name.startswith("fl_lightning.nas.")]
        trainer["callbacks"] = kept or None
    return run
