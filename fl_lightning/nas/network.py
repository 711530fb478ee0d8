"""The network of one architecture: what a search found, to be trained like any other network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import yaml
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellSpace


@final
class Network(nn.Module):
    """From images to logits; for `ImageClassifier`'s ``network``.

    Args:
        space: of cells.
        architecture: of the space, as its string, or the path of a file ``architecture.yaml`` that a
            search has left; the file's architecture alone is taken.
        num_classes: length of the output.
        in_channels: of the images.
        channels: of the first cells.
        cells: how many; of what, the space says.

    Raises:
        ConfigurationError: for an architecture that is none of the space.

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
        space: CellSpace,
        architecture: str,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int = 16,
        cells: int = 5,
    ) -> None:
        super().__init__()
        self.architecture = space.parse(_string_of(architecture))
        shape: dict[str, Any] = {"in_channels": in_channels, "channels": channels, "cells": cells}
        self.network = space.build(self.architecture, num_classes=num_classes, **shape)

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
