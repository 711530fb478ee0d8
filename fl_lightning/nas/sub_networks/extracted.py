"""Weights for the network of an architecture: its part of a supernet's, or those of its own training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.heads import head_names
from fl_lightning.models.checkpoints import read_tensors
from fl_lightning.nas.elastic import subnetwork
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture

# of the LightningModule and of `Network`, in each of which the network is called so
_PREFIX = re.compile(r"^(network\.)+")


def load_weights(
    network: nn.Module,
    architecture: Architecture,
    path: str,
    shape: Mapping[str, Any],
    *,
    new_head: bool = False,
) -> None:
    """Write into a network its part of a supernet's weights, or weights of its own.

    Batch norm statistics are those in the file, which a supernet has for its largest network: train
    the network further, or recalibrate.

    Args:
        network: plain, of the architecture.
        architecture: of the network.
        path: of a checkpoint of a `OneShot` of the same space, or of this very network.
        shape: of the network: arguments of the space's `build`.
        new_head: leave the classifier as it is, whatever the file's is.

    Raises:
        ConfigurationError: if the file is missing or has other weights.
    """
    heads = tuple(f"{name}." for name in head_names(network)) if new_head else ()
    tensors = {
        name: tensor for name, tensor in _tensors(path).items() if not name.startswith(heads)
    }
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
    if isinstance(space, SizeSpace):
        return (
            f"they are neither of a supernet of {space.name} with these settings ({settings}) nor of "
            f"{architecture}. For other classes set new_head"
        )
    return (
        f"they are not of a trained network of {architecture} with these settings ({settings}). "
        f"{space.name} is a space of cells: a supernet's weights make none of its networks, train it "
        "from scratch. For other classes set new_head"
    )


def _tensors(path: str) -> dict[str, Tensor]:
    return {_PREFIX.sub("", name): t for name, t in read_tensors(path, "weights").items()}


def _fit(tensors: Mapping[str, Tensor], network: nn.Module, heads: tuple[str, ...]) -> bool:
    """Return whether tensors are those of a network, its head aside."""
    body = {name: t for name, t in network.state_dict().items() if not name.startswith(heads)}
    return _shapes(tensors) == _shapes(body)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
