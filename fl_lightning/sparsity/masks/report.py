"""Densities of a mask per tensor and layer, as rows and as a figure, and statistics over many masks.

The statistics over n masks of N entries need only c_j, the number of masks in which entry j may move:

    density = Σ_j c_j / (n N),   union = Σ_j [c_j > 0] / N
    overlap = Σ_{a<b} |m_a ∧ m_b| / Σ_{a<b} |m_a ∨ m_b|       over all pairs

where Σ_{a<b} |m_a ∧ m_b| = Σ_j c_j (c_j - 1) / 2. For two masks this is Jaccard's index; for more,
numerators and denominators are summed separately, so that no pair is computed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


class MaskCounts:
    """Statistics over masks of the same tensors, which are added one by one; 4 bytes per entry.

    Attributes:
        num_masks: number of masks so far.
        num_entries: number of entries of each mask.

    Example:
        >>> counts = MaskCounts()
        >>> for bits in ([True, True, False, False], [False, True, True, False]):
        ...     counts.add(Mask({"weight": torch.tensor(bits)}))
        >>> counts.density, counts.union_density, counts.overlap
        (0.5, 0.75, 0.3333333333333333)
    """

    def __init__(self) -> None:
        self.num_masks = self.num_entries = 0
        self._counts: dict[str, Tensor] = {}

    def add(self, mask: Mask) -> None:
        """Count the entries of a further mask."""
        if not self.num_masks:
            self._counts = {name: torch.zeros_like(mask[name], dtype=torch.int32) for name in mask}
            self.num_entries = mask.num_entries
        for name, counts in self._counts.items():
            counts += mask[name]
        self.num_masks += 1

    @property
    def density(self) -> float:
        """Mean density of the masks, in [0, 1]."""
        return self._sum(1) / max(1, self.num_masks * self.num_entries)

    @property
    def union_density(self) -> float:
        """Fraction of entries that at least one mask lets move, in [0, 1]."""
        active = sum(int(counts.count_nonzero()) for counts in self._counts.values())
        return active / max(1, self.num_entries)

    @property
    def overlap(self) -> float:
        """Jaccard's index over all pairs of masks, in [0, 1]; 1 if there is no pair."""
        shared = (self._sum(2) - self._sum(1)) / 2
        either = (self.num_masks - 1) * self._sum(1) - shared
        return shared / either if either > 0 else 1.0

    def _sum(self, power: int) -> int:
        return sum(int(counts.long().pow(power).sum()) for counts in self._counts.values())
