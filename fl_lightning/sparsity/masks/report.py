"""Densities of a mask per layer, as rows and as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_lightning.sparsity.masks.mask import Mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerDensity:
    """Density of one tensor or layer.

    Attributes:
        name: name of the tensor or layer.
        num_entries: number of its entries.
        num_active: number of its entries that may move.
    """

    name: str
    num_entries: int
    num_active: int

    @property
    def density(self) -> float:
        """Fraction of entries that may move, in [0, 1]; 1 without entries."""
        return self.num_active / self.num_entries if self.num_entries else 1.0


def density_per_layer(mask: Mask, depth: int | None = None) -> list[LayerDensity]:
    """Density of each layer, weight and bias together, in the order of first appearance.

    Args:
        mask: the mask.
        depth: number of parts of the dotted names to keep, so that layers of a block are joined; None
            joins only the tensors of one layer.

    Example:
        >>> import torch
        >>> bits = torch.tensor([True, False])
        >>> mask = Mask({"net.0.weight": bits, "net.0.bias": ~bits, "net.1.weight": bits & ~bits})
        >>> [(row.name, row.num_active, row.num_entries) for row in density_per_layer(mask)]
        [('net.0', 2, 4), ('net.1', 0, 2)]
        >>> [row.density for row in density_per_layer(mask, depth=1)]
        [0.3333333333333333]
    """
    layers: dict[str, list[str]] = {}
    for name in mask:
        layer = ".".join(name.split(".")[:-1][:depth]) or name
        layers.setdefault(layer, []).append(name)
    active = mask.active_per_tensor
    return [
        LayerDensity(layer, sum(mask[n].numel() for n in names), sum(active[n] for n in names))
        for layer, names in layers.items()
    ]


MOST_ROWS = 150  # with more, layers are joined into blocks


def density_figure(mask: Mask) -> Figure:
    """Draw one bar per layer, in the network's order: the fraction of its entries that may move.

    A line marks the density of the whole mask. In networks with more than 150 layers, layers are joined
    into blocks.

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
