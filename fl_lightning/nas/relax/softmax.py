"""The mixed edge of DARTS: all operations run, weighted by a softmax.

    h = softmax(α)

Source: Liu, Simonyan, Yang 2019, DARTS, eq. 2.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from fl_lightning.nas.relax.relaxation import EdgeWeights, Relaxation, SearchStep


@final
class Softmax(Relaxation):
    """DARTS.

    Example:
        >>> import torch
        >>> Softmax().weights(torch.zeros(1, 4), SearchStep()).operations
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    draws = False

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return the softmax of every row."""
        return EdgeWeights(alpha.softmax(1))
