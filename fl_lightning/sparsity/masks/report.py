"""Where in the network a mask lets entries move: numbers for a table or a figure."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.sparsity.masks.mask import Mask


@dataclass(frozen=True)
class LayerDensity:
    """One row.

    Attributes:
        name: of the tensor or layer.
        num_entries: how many entries it has.
        num_active: how many of them may move.
    """

    name: str
    num_entries: int
    num_active: int

    @property
    def density(self) -> float:
        """Fraction that may move, in [0, 1]; 1 without entries."""
        return self.num_active / self.num_entries if self.num_entries else 1.0


def density_per_tensor(mask: Mask) -> list[LayerDensity]:
    """Return a row a tensor, in the mask's order."""
    active = mask.active_per_tensor
    return [LayerDensity(name, mask[name].numel(), active[name]) for name in mask]


def density_per_layer(mask: Mask, depth: int | None = None) -> list[LayerDensity]:
    """Return a row a layer: weight and bias together, in the order of first appearance.

    Args:
        mask: whose.
        depth: at most so many parts of the dotted names, to join whole blocks; None joins only
            the tensors of one layer.

    Example:
        >>> import torch
        >>> bits = torch.tensor([True, False])
        >>> mask = Mask({"net.0.weight": bits, "net.0.bias": ~bits, "net.1.weight": bits & ~bits})
        >>> [(row.name, row.num_active, row.num_entries) for row in density_per_layer(mask)]
        [('net.0', 2, 4), ('net.1', 0, 2)]
        >>> [row.density for row in density_per_layer(mask, depth=1)]
        [0.3333333333333333]
    """
    rows: dict[str, LayerDensity] = {}
    for row in density_per_tensor(mask):
        parts = row.name.split(".")
        layer = ".".join(parts[:-1][:depth]) or row.name
        so_far = rows.get(layer, LayerDensity(layer, 0, 0))
        rows[layer] = LayerDensity(
            layer, so_far.num_entries + row.num_entries, so_far.num_active + row.num_active
        )
    return list(rows.values())
