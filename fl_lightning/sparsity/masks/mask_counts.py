"""What many masks are together, from how often each entry may move: c_j of n masks.

density = Σ_j c_j / (n N),   union = Σ_j [c_j > 0] / N    of N entries
overlap = Σ_{a<b} |m_a ∧ m_b| / Σ_{a<b} |m_a ∨ m_b|       over all pairs

where Σ_{a<b} |m_a ∧ m_b| = Σ_j c_j (c_j - 1) / 2. For two masks that is Jaccard's overlap; for more
numerators and denominators are added up apart, so that no pair has to be looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.sparsity.masks.mask import Mask


class MaskCounts:
    """Counts over masks of the same tensors, added one by one: 4 bytes an entry, however many.

    Attributes:
        num_masks: so far.
        num_entries: of each.

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
        """Count one more mask."""
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
        """Fraction of the entries that at least one mask lets move, in [0, 1]."""
        active = sum(int(counts.count_nonzero()) for counts in self._counts.values())
        return active / max(1, self.num_entries)

    @property
    def overlap(self) -> float:
        """What pairs of masks share of what either lets move, in [0, 1]; 1 if there is no pair."""
        shared = (self._sum(2) - self._sum(1)) / 2
        either = (self.num_masks - 1) * self._sum(1) - shared
        return shared / either if either > 0 else 1.0

    def _sum(self, power: int) -> int:
        return sum(int(counts.long().pow(power).sum()) for counts in self._counts.values())
