"""A picture of where in the network a mask lets entries move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.masks.report import density_per_layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 150  # beyond, layers are joined to blocks


def density_figure(mask: Mask) -> Figure:
    """Return a bar a layer, in the network's order: the fraction of its entries that may move.

    A line marks the density of the whole mask. Of networks with more than 150 layers, layers are
    joined to blocks.

    Example:
        >>> import torch
        >>> figure = density_figure(Mask({"layer.weight": torch.tensor([True, False])}))
        >>> figure.axes[0].get_xlabel()
        'density'
    """
    from matplotlib.figure import Figure

    rows, depth = density_per_layer(mask), 8
    while len(rows) > MOST_ROWS and depth > 1:
        depth -= 1
        rows = density_per_layer(mask, depth)
    figure = Figure(figsize=(8.0, 1.2 + 0.16 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(rows)), [row.density for row in rows], color="#4878a8")
    axes.axvline(mask.density, color="#404040", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.set(xlabel="density", ylim=(len(rows) - 0.4, -0.6), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{mask.num_active:,} of {mask.num_entries:,} entries may move", fontsize=10)
    return figure
