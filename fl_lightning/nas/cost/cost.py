"""What an architecture costs, whatever space it is of."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost, count
from fl_lightning.nas.cost.table import cost_table
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace


class Buildable(Protocol):
    """A space that builds the network of an architecture."""

    def build(self, architecture: Architecture, *, num_classes: int, **options: Any) -> nn.Module:
        """Return it."""


def of(
    space: SearchSpace,
    architecture: Architecture,
    *,
    side: int = 32,
    in_channels: int = 3,
    num_classes: int = 10,
    **options: Any,
) -> Cost:
    """Return what one image costs the network of an architecture, exactly.

    Of cells it is a sum from the space's table, which is counted once; of sizes the space's formulas
    say it; of other spaces the network is built, without memory for its parameters, and counted.

    Args:
        space: of the architecture.
        architecture: of which.
        side: of the images, in pixels.
        in_channels: of the images.
        num_classes: of the classifier.
        options: of the space's `build`, e.g. ``channels`` and ``cells``.

    Raises:
        ConfigurationError: if the architecture is of another space.

    Example:
        >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
        >>> space = NASBench201()
        >>> of(space, space.architecture([3] * 6)).flops
        220119690
    """
    if architecture.space != space:
        raise ConfigurationError(
            f"an architecture of {architecture.space.name} has no cost in {space.name}"
        )
    shape = {"in_channels": in_channels, "num_classes": num_classes, **options}
    if isinstance(space, SizeSpace):
        return space.cost(architecture, side=side, **shape)
    if isinstance(space, CellSpace):
        return cost_table(space, side=side, **shape).of(space.operations_of(architecture))
    return built_cost(space, architecture, side=side, **shape)  # type: ignore[arg-type]


def built_cost(space: Buildable, architecture: Architecture, *, side: int, **options: Any) -> Cost:
    """Return what one image costs a network that is built for it, on no device.

    Args:
        space: of the architecture.
        architecture: of which.
        side: of the images, in pixels.
        options: of the space's `build`; ``in_channels`` among them.
    """
    with torch.device("meta"):
        network = space.build(architecture, **options)
        return count(network, torch.empty(1, options["in_channels"], side, side))
