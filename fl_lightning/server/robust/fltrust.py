"""FLTrust: the server trains as well, on examples that it trusts, and judges others by that.

    t_i = max(0, cos(x_i, x_0)),    aggregate = Σ_i t_i |x_0| / |x_i| x_i / Σ_i t_i

Source: Cao et al. 2021, FLTrust, Algorithm 2, with x_0 the server's own update. Here the server's
root set is the shard of one client whose number is given: it trains as any other does, and its
update judges but is no part of the mean. If it trusts nobody, the aggregate is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined, row_norms
from fl_lightning.server.robust.rule import RobustRule, RuleContext


@final
@dataclass(frozen=True)
class FLTrust(RobustRule):
    """The mean of updates that point where a trusted client's does, scaled to its norm.

    Args:
        trusted_client: whose shard is the server's root set; it must be in every round's cohort.

    Raises:
        ConfigurationError: if it is negative.
    """

    trusted_client: int = 0

    def __post_init__(self) -> None:
        if self.trusted_client < 0:
            raise ConfigurationError(
                f"FLTrust: trusted_client must be a client's number, got {self.trusted_client}"
            )

    @property
    def min_updates(self) -> int:
        """The trusted one and another."""
        return 2

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the trusted mean.

        Raises:
            RoundFailure: if the trusted client has sent no update.
        """
        if self.trusted_client not in rows.client_ids:
            raise RoundFailure(
                f"FLTrust judges by the update of client {self.trusted_client}, which took no part "
                "in this round: let every client take part, e.g. with cohort AllClients"
            )
        own = rows.client_ids.index(self.trusted_client)
        return combined(rows, trusted_shares(similarities(rows, own), row_norms(rows), own))


def similarities(rows: Rows, place: int) -> Floats:
    """Return the inner products of all rows with one of them, float64, shape (n,)."""
    products = np.zeros(len(rows))
    for _, block in rows.blocks():
        products += np.einsum("ij,j->i", block, block[place], dtype=np.float64)
    return products


def trusted_shares(products: Floats, norms: Floats, own: int) -> Floats:
    """Return the updates' coefficients in the aggregate; 0 for the trusted one.

    Args:
        products: inner products with the trusted update, shape (n,).
        norms: shape (n,).
        own: place of the trusted update.

    Example:
        >>> trusted_shares(np.array([4.0, 6.0, -2.0]), np.array([2.0, 4.0, 1.0]), 0).tolist()
        [0.0, 0.5, 0.0]
    """
    lengths = np.maximum(norms, np.finfo(float).tiny)
    trust = np.maximum(products / lengths / lengths[own], 0)
    trust[own] = 0
    total = max(trust.sum(), np.finfo(float).tiny)
    shares: Floats = trust / total * norms[own] / lengths
    return shares
