"""How alike tasks, clients and their masks are, pair by pair.

cosine = <τ_a, τ_b> / (|τ_a| |τ_b|)         overlap = |m_a ∧ m_b| / |m_a ∨ m_b|  (Jaccard)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.tasks.merging import jaccard_overlap
from fl_lightning.sparsity.tasks.task_vectors import TaskVector, check_same_parameters


@dataclass(frozen=True)
class Similarity:
    """One pair.

    Attributes:
        one: name of the first.
        other: name of the second.
        overlap: of the entries that may move or moved, Jaccard's, in [0, 1].
        cosine: of task vectors, in [-1, 1], 0 if one of them is zero; None for masks.
    """

    one: str
    other: str
    overlap: float
    cosine: float | None = None


def compare_masks(masks: Mapping[str, Mask]) -> list[Similarity]:
    """Return a row for each pair of masks, by their names.

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
    """Return a row for each pair of task vectors: their cosine, and the overlap of what moved.

    Raises:
        ConfigurationError: if they are over different parameters.

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
