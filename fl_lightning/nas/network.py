"""The network of one architecture: what a search found, to be trained like any other network."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.retraining import architecture_in
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.sub_networks.extracted import load_weights


@final
class Network(nn.Module):
    """From images to logits; for `ImageClassifier`'s ``network``.

    Args:
        space: of cells or of sizes.
        architecture: of the space, as its string, or the path of a YAML file that a search has left
            (architecture.yaml, retrain.yaml, best.yaml); the file's architecture alone is taken.
        num_classes: length of the output.
        in_channels: of the images.
        channels: of the first cells, in a space of cells; as the space has them if None.
        cells: how many; of what, the space says; as the space has them if None.
        weights: to begin with: a checkpoint of a `OneShot` of the same space of sizes, or of a run that
            trained this very network; None for fresh ones.
        new_head: whether the classifier is fresh all the same, as other classes need it; weights may
            then have another number of classes.

    Raises:
        ConfigurationError: for an architecture that is none of the space, and for what the space does
            not have.

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
        architecture: str,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int | None = None,
        cells: int | None = None,
        weights: str | None = None,
        new_head: bool = False,
    ) -> None:
        super().__init__()
        is_file = architecture.endswith((".yaml", ".yml"))
        self.architecture = space.parse(architecture_in(architecture) if is_file else architecture)
        sizes = {"channels": channels, "cells": cells}
        given = {name: value for name, value in sizes.items() if value is not None}
        if isinstance(space, SizeSpace) and given:
            raise ConfigurationError(
                f"{next(iter(given))}: {space.name} is not made of cells; its sizes are settings of the space"
            )
        if new_head and weights is None:
            raise ConfigurationError(
                "new_head: all of a network without weights is new: leave it out"
            )
        shape = {"num_classes": num_classes, "in_channels": in_channels, **given}
        self.network = space.build(self.architecture, **shape)
        if weights is not None:
            load_weights(self.network, self.architecture, weights, shape, new_head=new_head)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes)."""
        logits: Tensor = self.network(images)
        return logits
