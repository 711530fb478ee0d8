"""Statistics and merging of several masks, and the similarity of masks and of task vectors.

All follow from c_j, the number of masks by which entry j trains, of n masks of N entries:

    density = Σ_j c_j / (n N),   union = [c_j > 0],   intersection = [c_j = n],   majority = [c_j > n / 2]
    overlap = Σ_{a<b} |m_a ∧ m_b| / Σ_{a<b} |m_a ∨ m_b|       over all pairs
    cosine of two task vectors = <τ_a, τ_b> / (|τ_a| |τ_b|)

where Σ_{a<b} |m_a ∧ m_b| = Σ_j c_j (c_j - 1) / 2. For two masks the overlap is Jaccard's index; for more it is
the ratio of the sums over pairs, for which no pair is compared by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import Mask, some
from fl_lightning.sparsity.tasks.task_vectors import TaskVector, check_same_parameters


class MaskCounts:
    """Counts for each entry how many masks train it: for unions, overlaps and so on; 4 bytes per entry.

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

    def __init__(self, masks: Iterable[Mask] = ()) -> None:
        self.num_masks = self.num_entries = 0
        self._counts: dict[str, Tensor] = {}
        for mask in masks:
            self.add(mask)

    def add(self, mask: Mask) -> None:
        """Add a mask to the counts; raises ConfigurationError if its tensors differ from earlier masks'."""
        if not self.num_masks:
            self._counts = {name: torch.zeros_like(mask[name], dtype=torch.int32) for name in mask}
            self.num_entries = mask.num_entries
        ours, theirs = ({n: t.shape for n, t in each.items()} for each in (self._counts, mask))
        if differing := sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n)):
            raise ConfigurationError(
                f"masks to merge must have the same tensors, and mask {self.num_masks} differs from mask 0 in "
                f"{some(differing)}: calibrate all on the same model, with the same names"
            )
        for name, counts in self._counts.items():
            counts += mask[name].to(counts.device)
        self.num_masks += 1

    def where(self, condition: Callable[[Tensor], Tensor]) -> Mask:
        """Return the mask of entries whose number of masks meets a condition, e.g. ``lambda count: count > 3``.

        Raises:
            ConfigurationError: if there is no mask.
        """
        if not self.num_masks:
            raise ConfigurationError("there are no masks to merge: give at least one")
        return Mask({name: condition(counts) for name, counts in self._counts.items()})

    @property
    def density(self) -> float:
        """Mean density of the masks (fraction of entries that train), in [0, 1]."""
        return self._sum(1) / max(1, self.num_masks * self.num_entries)

    @property
    def union_density(self) -> float:
        """Fraction of entries that at least one of the masks trains, in [0, 1]."""
        active = sum(int(counts.count_nonzero()) for counts in self._counts.values())
        return active / max(1, self.num_entries)

    @property
    def overlap(self) -> float:
        """Jaccard overlap pooled over all pairs of masks, in [0, 1]; 1 without pairs, or if all masks are empty."""
        shared = (self._sum(2) - self._sum(1)) / 2
        either = (self.num_masks - 1) * self._sum(1) - shared
        return shared / either if either > 0 else 1.0

    def _sum(self, power: int) -> int:
        return sum(int(counts.long().pow(power).sum()) for counts in self._counts.values())


def union(masks: Iterable[Mask]) -> Mask:
    """Return the mask of the entries that at least one of the masks trains.

    Raises:
        ConfigurationError: if there is no mask, or the masks have different tensors.

    Example:
        >>> one, other = (Mask({"a": torch.tensor(bits)}) for bits in ([True, False], [True, True]))
        >>> union([one, other])["a"].tolist(), intersection([one, other])["a"].tolist()
        ([True, True], [True, False])
        >>> jaccard_overlap(one, other)
        0.5
    """
    return MaskCounts(masks).where(lambda counts: counts > 0)


def intersection(masks: Iterable[Mask]) -> Mask:
    """Return the mask of the entries that every mask trains; raises as `union`."""
    of_all = MaskCounts(masks)
    return of_all.where(lambda counts: counts == of_all.num_masks)


def majority(masks: Iterable[Mask]) -> Mask:
    """Return the mask of the entries that more than half of the masks train; raises as `union`."""
    of_all = MaskCounts(masks)
    return of_all.where(lambda counts: 2 * counts > of_all.num_masks)


def jaccard_overlap(one: Mask, other: Mask) -> float:
    """Return Jaccard's index of the trained entries of two masks, in [0, 1]; 1 for two empty masks."""
    return MaskCounts([one, other]).overlap


@dataclass(frozen=True)
class Similarity:
    """How similar two masks, or two task vectors, are.

    Attributes:
        one: name of the first mask or task vector.
        other: name of the second mask or task vector.
        overlap: Jaccard's index of the entries that train (of masks) or differ from 0 (of task vectors).
        cosine: cosine of task vectors, in [-1, 1], 0 if one of them is zero; None for masks.
    """

    one: str
    other: str
    overlap: float
    cosine: float | None = None


def compare_masks(masks: Mapping[str, Mask]) -> list[Similarity]:
    """Return the similarity (Jaccard's index) of every pair of masks.

    Example:
        >>> import torch
        >>> bits = torch.tensor([True, True, False])
        >>> compare_masks({"cats": Mask({"a": bits}), "dogs": Mask({"a": bits.flip(0)})})
        [Similarity(one='cats', other='dogs', overlap=0.3333333333333333, cosine=None)]
    """
    return [
        Similarity(one, other, jaccard_overlap(masks[one], masks[other]))
        for one, other in combinations(masks, 2)
    ]


def compare_tasks(tasks: Mapping[str, TaskVector]) -> list[Similarity]:
    """Return the similarity of every pair of task vectors: cosine, and overlap of their nonzero entries.

    Raises:
        ConfigurationError: if their parameters differ.

    Example:
        >>> import torch
        >>> shapes = {"a": torch.Size([2])}
        >>> north, east = (TaskVector(shapes, row) for row in torch.eye(2))
        >>> compare_tasks({"north": north, "east": east})
        [Similarity(one='north', other='east', overlap=0.0, cosine=0.0)]
    """
    supports = {name: task.support() for name, task in tasks.items()}
    rows = []
    for one, other in combinations(tasks, 2):
        check_same_parameters(tasks[one], tasks[other])
        overlap = jaccard_overlap(supports[one], supports[other])
        rows.append(Similarity(one, other, overlap, _cosine(tasks[one], tasks[other])))
    return rows


def _cosine(one: TaskVector, other: TaskVector) -> float:
    a = one.vector.double()
    b = other.vector.to(a.device).double()
    norms = a.norm() * b.norm()
    return float((a @ b / norms).clamp(-1, 1)) if norms > 0 else 0.0
