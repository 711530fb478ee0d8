"""A sub-network with a supernet's weights, taken from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models.checkpoints import read_tensors
from fl_lightning.nas.elastic import subnetwork
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture


def load_part(
    network: nn.Module,
    space: SizeSpace,
    architecture: Architecture,
    path: str,
    shape: Mapping[str, Any],
) -> None:
    """Write into a network its part of a supernet's weights, or weights of its own.

    Batch norm statistics are those in the file, which a supernet has for its largest network: train
    the network further, or recalibrate.

    Args:
        network: plain, of the architecture.
        space: it is of.
        architecture: of the network.
        path: of a checkpoint of a `OneShot`, or of the network's state dict.
        shape: arguments of the space's `supernet`.

    Raises:
        ConfigurationError: if the file is missing or has other weights.
    """
    tensors = _tensors(path)
    if _shapes(tensors) == _shapes(network.state_dict()):
        network.load_state_dict(tensors)
        return
    supernet = space.supernet(**shape)
    if _shapes(tensors) != _shapes(supernet.state_dict()):
        raise ConfigurationError(
            f"weights {path}: they are neither of a supernet of {space.name} with these settings "
            f"({', '.join(f'{name} {value}' for name, value in shape.items())}) nor of {architecture}"
        )
    supernet.load_state_dict(tensors)
    subnetwork.copy(supernet, network)


def _tensors(path: str) -> dict[str, Tensor]:
    found = read_tensors(path, "weights")
    return {name.removeprefix("network."): tensor for name, tensor in found.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
