"""Merged masks, and the similarity of masks and task vectors.

union:         entries that any mask lets move             m_1 ∨ … ∨ m_n
intersection:  entries that all masks let move             m_1 ∧ … ∧ m_n
majority:      entries that more than half let move        Σ m_i > n / 2
overlap:       Jaccard's index of two masks                |m_a ∧ m_b| / |m_a ∨ m_b|
cosine:        of two task vectors                         <τ_a, τ_b> / (|τ_a| |τ_b|)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import Mask, some
from fl_lightning.sparsity.tasks.task_vectors import TaskVector, check_same_parameters


def union(masks: Iterable[Mask]) -> Mask:
    """Mask of the entries that at least one mask lets move.

    Raises:
        ConfigurationError: if there is no mask, or their tensors differ; likewise in the functions below.

    Example:
        >>> one, other = (Mask({"a": torch.tensor(bits)}) for bits in ([True, False], [True, True]))
        >>> union([one, other])["a"].tolist(), intersection([one, other])["a"].tolist()
        ([True, True], [True, False])
        >>> jaccard_overlap(one, other)
        0.5
    """
    return Mask({name: counts > 0 for name, counts in _votes(masks)[0].items()})


def intersection(masks: Iterable[Mask]) -> Mask:
    """Mask of the entries that every mask lets move."""
    votes, num_masks = _votes(masks)
    return Mask({name: counts == num_masks for name, counts in votes.items()})


def majority(masks: Iterable[Mask]) -> Mask:
    """Mask of the entries that more than half of the masks let move."""
    votes, num_masks = _votes(masks)
    return Mask({name: 2 * counts > num_masks for name, counts in votes.items()})


def jaccard_overlap(one: Mask, other: Mask) -> float:
    """Jaccard's index of the entries that two masks let move, in [0, 1]; 1 for two empty masks."""
    in_both = intersection([one, other]).num_active
    in_any = one.num_active + other.num_active - in_both
    return in_both / in_any if in_any else 1.0


def _votes(masks: Iterable[Mask]) -> tuple[dict[str, Tensor], int]:
    votes: dict[str, Tensor] = {}
    num_masks = 0
    for mask in masks:
        if not num_masks:
            votes = {name: torch.zeros_like(mask[name], dtype=torch.int32) for name in mask}
        _check_same_tensors(votes, mask, num_masks)
        for name, counts in votes.items():
            counts += mask[name].to(counts.device)
        num_masks += 1
    if not num_masks:
        raise ConfigurationError("no masks: give at least one to merge")
    return votes, num_masks


def _check_same_tensors(votes: dict[str, Tensor], mask: Mask, index: int) -> None:
    shapes = ({name: t.shape for name, t in tensors.items()} for tensors in (votes, mask))
    ours, theirs = shapes
    if differing := sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n)):
        raise ConfigurationError(
            f"masks are merged over the same tensors: mask {index} differs from mask 0 in "
            f"{some(differing)}. Calibrate all on the same model with the same parameters."
        )


@dataclass(frozen=True)
class Similarity:
    """Similarity of a pair of masks or task vectors.

    Attributes:
        one: name of the first.
        other: name of the second.
        overlap: Jaccard's index of the entries that may move, or moved, in [0, 1].
        cosine: cosine of task vectors, in [-1, 1], 0 if one of them is zero; None for masks.
    """

    one: str
    other: str
    overlap: float
    cosine: float | None = None


def compare_masks(masks: Mapping[str, Mask]) -> list[Similarity]:
    """Compare each pair of masks.

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
    """Compare each pair of task vectors: their cosine, and the overlap of the entries that moved.

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
