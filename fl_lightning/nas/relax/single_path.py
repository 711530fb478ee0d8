"""One operation an edge, drawn; no gradient to α: how sampled searches train shared weights.

    h = onehot(o),   o ~ softmax(α)

With α = 0 every architecture is as likely (random search with shared weights). A controller (ENAS)
hands over the choices that it has sampled itself: `weights_of`.
Source: Pham et al. 2018, ENAS; Li, Talwalkar 2019; Guo et al. 2020, Single Path One-Shot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fl_lightning.nas.relax.relaxation import (
    EdgeWeights,
    Relaxation,
    SearchStep,
    drawn_from,
    drawn_operations,
    one_hot,
)


def weights_of(choices: Sequence[int], like: Tensor) -> EdgeWeights:
    """Return the weights that run one architecture.

    Args:
        choices: the number of the operation on every row.
        like: a tensor (num_rows, num_operations) of the dtype and on the device to use.

    Example:
        >>> weights_of([1, 0], torch.zeros(2, 3)).operations
        tensor([[0., 1., 0.],
                [1., 0., 0.]])
    """
    column = torch.tensor(choices)[:, None]
    return EdgeWeights(one_hot(column, like.detach()), tuple((number,) for number in choices))


@final
class SinglePath(Relaxation):
    """Every edge runs an operation drawn by softmax(α)."""

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return one drawn operation an edge."""
        return weights_of(drawn_operations(alpha, 1, drawn_from(step))[:, 0].tolist(), alpha)
