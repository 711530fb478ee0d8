"""Sums that sites encrypt: what a configuration says of them, and what comes of one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.server.protected import Expense


@dataclass(frozen=True)
class EncryptedSum:
    """What a configuration says of sums that sites encrypt.

    Attributes:
        degree: N of CKKS.
        scheme: of the encryption.
    """

    degree: int
    scheme: str = "ckks"


@dataclass(frozen=True)
class OpenedSum:
    """What comes of a sum over sites.

    Attributes:
        values: Σ a_k Δ_k of those who are in it, float64 of shape (k,).
        clients: who is in it.
        expense: of the sum.
    """

    values: Tensor
    clients: frozenset[int]
    expense: Expense
