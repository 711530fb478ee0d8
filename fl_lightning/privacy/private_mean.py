"""The mean of clipped updates over a cohort of fixed expected size, and an adaptive clip norm.

    aggregate = Σ_k clip(Δ_k) / qN

Clients have equal weights for any number of examples; the denominator is the expected cohort, because
the number of replies is private as well. If all clients reply, it is the plain mean of the clipped
updates, bit for bit. Source: McMahan et al. 2018 (1710.06963), Section 2, estimator f̃_f.
Differs: updates are clipped on arrival, after all transforms, so that the bound holds for every
compression.

The adaptive clip norm follows a quantile of the updates' norms:

    b̃ = ½ + (Σ_k (b_k - ½) + N(0, s²)) / m,   b_k = 1 if ‖Δ_k‖ ≤ C else 0
    C ← C · exp(-η (b̃ - γ))
    z_Δ = (z⁻² - (2 s)⁻²)^(-½)

m is the expected cohort. A bit changes the sum by ½ at most, so that the query's noise multiplier is
2 s; with noise z_Δ on the updates, both together cost as much as one release with noise z.
Source: Andrew et al. 2021 (1905.03871), Algorithm 1 and Theorem 1. Differs: sampled clients that
sent nothing count as ½, since the number of replies is not released.

An update is clipped as one flat ball, over all coordinates that travel.

    Δ ← Δ · min(1, S / ‖Δ‖₂)

Source: McMahan et al. 2018 (1710.06963), Section 2.2, "flat clipping".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import Draw
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.noise.grid import Grid
from fl_lightning.server.aggregator import PrivateAggregator
from fl_lightning.server.means.running_mean import new_mean

# (clipped delta, client) -> the delta that the client sends
Release = Callable[[Tensor, int], Tensor]


class PrivateMean(PrivateAggregator):
    """Aggregator that divides the sum of clipped updates by the expected cohort size (McMahan et al. 2018).

    The attributes ``clip_norm``, ``release``, ``clips`` and ``coins`` are set before `open`.

    Args:
        expected: expected number of clients of a round, qN > 0.
        exact: see `Mean`.
        release: function that a client applies to its clipped update before sending, or None.

    Attributes:
        exact: see `Mean`.
        clip_norm: clip norm of the current round.
        release: function that a client applies to its clipped update before sending, or None.
        clips: whether to clip here; False if clipping and release were done at remote sites.
        coins: maps a client to the coins that round its update to a grid, for integer sums; None for
            floating-point sums.
        grid: grid of the open round, if there are coins.
        total: sum in steps of the grid, int64 of shape (k,), if there are coins.

    Example:
        >>> mean = PrivateMean(expected=4)
        >>> mean.clip_norm = 1.0
        >>> mean.open(torch.empty(2))
        >>> mean.add(ClientUpdate(0, torch.tensor([3.0, 4.0]), torch.empty(0), 10, 1))
        >>> mean.add(ClientUpdate(1, torch.tensor([0.2, 0.0]), torch.empty(0), 99, 1))
        >>> mean.close(), mean.num_unclipped, mean.num_replies
        (tensor([0.2000, 0.2000]), 1, 2)
    """

    def __init__(
        self, expected: float, exact: bool = False, release: Release | None = None
    ) -> None:
        self.exact = exact
        self.clip_norm = float("inf")
        self.clips = True
        self.release = release
        self.coins: Callable[[int], Draw] | None = None
        self.grid: Grid | None = None
        self._expected = expected

    @override
    def open(self, like: Tensor) -> None:
        self._like = like
        self._mean = new_mean(like, exact=self.exact)
        self._counts = torch.zeros(2, dtype=torch.int64, device=like.device)
        self.grid = None if self.coins is None else Grid.of(self.clip_norm, len(like))
        self.total = torch.zeros(
            0 if self.grid is None else len(like), dtype=torch.int64, device=like.device
        )

    def add(self, update: ClientUpdate) -> None:
        """Clip a client's update, and add it to the round's sum."""
        norm = self.clip_norm if self.clips else float("inf")
        delta, is_within = clipped(update.delta, norm)
        if self.release is not None:
            delta = self.release(delta, update.client_id)
        if self.grid is None or self.coins is None:
            self._mean.add(delta, 1)
        else:
            steps = self.grid.to_steps(delta, self.coins(update.client_id))
            self.total += torch.from_numpy(steps).to(self.total.device)
        self._counts += torch.stack([is_within, torch.ones_like(is_within)])

    @override
    def sums(self) -> list[Tensor]:
        return [*self._mean.sums(), self.total, self._counts]

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        *mean, self.total, self._counts = sums
        self._mean.load_sums(mean)

    def close(self) -> Tensor:
        """Return the round's sum divided by the expected cohort size, without the server's noise."""
        if self.grid is not None:
            return self.grid.value(self.total).to(self._like) / self._expected
        return self._mean.value() * (self.num_replies / self._expected)

    @property
    @override
    def num_unclipped(self) -> int:
        return int(self._counts[0])

    @property
    @override
    def num_replies(self) -> int:
        return int(self._counts[1])


def update_noise_multiplier(noise_multiplier: float, bits_stddev: float) -> float:
    """Return the updates' noise multiplier z_Δ ≥ z with which updates and a noisy count cost as much as z.

    Args:
        noise_multiplier: z ≥ 0 of both releases together.
        bits_stddev: standard deviation s > z / 2 of the noise on the count.

    Raises:
        ConfigurationError: if the count alone would cost more than both together may.

    Example:
        >>> round(update_noise_multiplier(1.0, bits_stddev=5.0), 12)
        1.005037815259
    """
    if noise_multiplier == 0:
        return 0.0
    left = noise_multiplier**-2 - (2 * bits_stddev) ** -2 if bits_stddev > 0 else -math.inf
    if left <= 0:
        raise ConfigurationError(
            f"federation.privacy: bits_stddev {bits_stddev:g} is too little noise on the count of "
            f"unclipped updates for a noise multiplier of {noise_multiplier:g}: it must be above "
            f"{noise_multiplier / 2:g}, or the cohort larger"
        )
    return 1 / math.sqrt(left)


@final
@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Adaptive clipping (Andrew et al. 2021): the clip norm follows a quantile of the updates' norms.

    Args:
        quantile: share of updates that should remain unclipped, γ in (0, 1).
        learning_rate: learning rate η > 0 of the clip norm.
        bits_stddev: standard deviation s ≥ 0 of the noise on the number of unclipped updates; a
            twentieth of the expected cohort if None.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> round(AdaptiveClip().next_norm(0.1, unclipped=0.9), 8)
        0.09231163
        >>> round(AdaptiveClip().next_norm(0.1, unclipped=0.2), 8)
        0.10618365
    """

    from_options: ClassVar[bool] = True  # YAML gives its options without its class

    quantile: float = 0.5
    learning_rate: float = 0.2
    bits_stddev: float | None = None

    def __post_init__(self) -> None:
        check_range(
            "federation.privacy: quantile",
            self.quantile,
            "in (0, 1)",
            ": it is the share of updates that remain unclipped",
        )
        check_range(
            "federation.privacy: the clip norm's learning_rate",
            self.learning_rate,
            "above 0 and finite",
            ": leave adaptive_clip out for a fixed norm",
        )
        check_range("federation.privacy: bits_stddev", self.bits_stddev, "at least 0 and finite")

    def next_norm(self, clip_norm: float, unclipped: float) -> float:
        """Return the clip norm of the next round.

        Args:
            clip_norm: clip norm of this round.
            unclipped: noisy share of updates within the clip norm, b̃.
        """
        return clip_norm * math.exp(-self.learning_rate * (unclipped - self.quantile))


def clipped(delta: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Clip a vector to an L2 norm; return the vector, and whether it was within the norm already.

    Args:
        delta: finite, shape (k,).
        clip_norm: S > 0; ∞ changes no bit.

    Returns:
        The clipped vector, shape (k,), and a bool scalar.

    Example:
        >>> clipped(torch.tensor([3.0, 4.0]), clip_norm=1.0)
        (tensor([0.6000, 0.8000]), tensor(False))
        >>> clipped(torch.tensor([3.0, 4.0]), clip_norm=5.0)
        (tensor([3., 4.]), tensor(True))
    """
    wide = torch.float32 if delta.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(delta, dtype=wide)
    scale = (clip_norm / norm).clamp(max=1.0)  # of a zero vector ∞
    return delta * scale.to(delta.dtype), norm <= clip_norm
