"""Binary gates (ProxylessNAS): one path runs when weights learn, two when α does.

    weights:  one operation of each row, drawn by softmax(α); no gradient to α
    α:        two, drawn without replacement; q = softmax of their two logits; one is open, by q
              dL/dα_i = Σ_j dL/dg_j q_j (δ_ij - q_i)    over the two
              then both logits are shifted so that the others' probabilities stay

That gradient is the one of q, so a gate is an open or closed one with the gradient of q.
Source: Cai, Zhu, Han 2019, ProxylessNAS, eq. 4 and section 3.2.1, and its code.
The paper's Adam has β₁ = 0: momentum would move logits of paths that were not drawn. Where the server of a
federation steps α, clients have drawn different paths, and no logits are shifted.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.relaxation import (
    EdgeWeights,
    Relaxation,
    SearchStep,
    drawn_from,
    drawn_operations,
    one_hot,
    straight_through,
)


def gate_weights(alpha: Tensor, paths: Tensor, opened: Tensor) -> EdgeWeights:
    """Return gates of which one is open, with the gradient of the softmax over the paths.

    Args:
        alpha: (num_rows, num_operations).
        paths: numbers of the operations that run, (num_rows, num_paths).
        opened: number of the operation whose gate is open, (num_rows, 1); one of the paths.
    """
    paths = paths.to(alpha.device)
    shares = alpha.gather(1, paths).softmax(1)
    soft = torch.zeros_like(alpha).scatter(1, paths, shares)
    running = tuple(tuple(sorted(row)) for row in paths.tolist())
    return EdgeWeights(straight_through(one_hot(opened, alpha), soft), running)


def shifted(before: Tensor, after: Tensor, moved: Tensor) -> Tensor:
    """Return `after`, the moved logits shifted so that unmoved ones keep their probability.

    The sum of the moved ones' exponentials stays what it was.

    Args:
        before: (num_rows, num_operations).
        after: (num_rows, num_operations).
        moved: of the same shape: which logits the step was about.
    """
    sums = [logits.masked_fill(~moved, -torch.inf).logsumexp(1) for logits in (before, after)]
    offset = (sums[1] - sums[0])[:, None]
    return torch.where(moved, after - offset, before)


@final
class BinaryGates(Relaxation):
    """ProxylessNAS.

    Args:
        paths: ``two`` run when α learns, or ``all``, which needs the memory of all.

    Raises:
        ConfigurationError: if it is something else.
    """

    def __init__(self, paths: Literal["two", "all"] = "two") -> None:
        if paths not in ("two", "all"):
            raise ConfigurationError(f"paths must be two or all, got {paths!r}")
        self._paths = paths

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return the gates of a step."""
        generator, num_operations = drawn_from(step), alpha.shape[1]
        if not step.moves_alpha:
            drawn = drawn_operations(alpha, 1, generator)
            return gate_weights(alpha.detach(), drawn, drawn)
        num_paths = num_operations if self._paths == "all" else min(2, num_operations)
        paths = drawn_operations(alpha, num_paths, generator)
        among = alpha.detach().cpu().gather(1, paths)
        return gate_weights(alpha, paths, paths.gather(1, drawn_operations(among, 1, generator)))

    def stepped(self, before: Tensor, after: Tensor, weights: EdgeWeights) -> Tensor:
        """Return α, the logits of the paths that ran shifted, the others as they were."""
        if weights.running is None:
            return after
        moved = torch.zeros_like(before, dtype=torch.bool)
        for row, numbers in enumerate(weights.running):
            moved[row, list(numbers)] = True
        return shifted(before, after, moved)
