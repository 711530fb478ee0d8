"""The network of one architecture: what a search found, to be trained like any other network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import yaml
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.sub_networks.extracted import load_part


@final
class Network(nn.Module):
    """From images to logits; for `ImageClassifier`'s ``network``.

    Args:
        space: of cells or of sizes.
        architecture: of the space, as its string, or the path of a file ``architecture.yaml`` that a
            search has left; the file's architecture alone is taken.
        num_classes: length of the output.
        in_channels: of the images.
        channels: of the first cells, in a space of cells; 16 if None.
        cells: how many; of what, the space says; 5 if None.
        weights: a checkpoint of a `OneShot` of the same space of sizes, or weights of this very
            network, to begin with; None for fresh ones.

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
    ) -> None:
        super().__init__()
        self.architecture = space.parse(_string_of(architecture))
        sizes = {"channels": channels, "cells": cells}
        shape: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels}
        if isinstance(space, SizeSpace):
            if given := [name for name, value in sizes.items() if value is not None]:
                raise ConfigurationError(
                    f"{given[0]}: {space.name} is not made of cells; its sizes are settings of the space"
                )
        elif weights is not None:
            raise ConfigurationError(
                f"weights: they are taken from a supernet of sizes, and {space.name} is a space of "
                "cells: leave it out, and train from scratch"
            )
        else:
            shape |= {"channels": channels or 16, "cells": cells or 5}
        self.network = space.build(self.architecture, **shape)
        if weights is not None:
            assert isinstance(space, SizeSpace)
            load_part(self.network, space, self.architecture, weights, shape)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes)."""
        logits: Tensor = self.network(images)
        return logits


def _string_of(architecture: str) -> str:
    """Return the string of an architecture, which may stand in a file."""
    if not architecture.endswith((".yaml", ".yml")):
        return architecture
    try:
        content = yaml.safe_load(Path(architecture).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"architecture {architecture}: {error}") from error
    found = content.get("architecture") if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise ConfigurationError(
            f"architecture {architecture}: the file has no line 'architecture: …', as those that a search "
            "leaves have"
        )
    return found
