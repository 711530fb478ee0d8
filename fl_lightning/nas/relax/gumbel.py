"""Gumbel noise on α: one operation an edge (GDAS), or soft weights that sharpen (FBNet).

    p = softmax((log softmax α + g) / τ),   g Gumbel
    GDAS:   h = onehot(argmax p), with the gradient of p;   τ from 10 to 0.1, linearly
    FBNet:  h = p;   τ = 5 · 0.956^epoch

In GDAS, what does not run has no output to multiply h by, and its α still has to learn. Three rules:

    others    an operation that is not selected          gradient of its h
    bare      does not run, adds its bare h = 0          Σ dL/dy: as if it had given ones
    all       runs                                       dL/dy · o(x)
    none      does not run                               none

Source: Dong, Yang 2019, GDAS, section 3.2, and its code for NAS-Bench-201, whose rule is ``bare``; Wu
et al. 2019, FBNet, section 3.3.
Differs: the released code computes (onehot - p) + p, which is one-hot up to rounding; here
onehot + (p - p), which always is.
"""

from __future__ import annotations

from typing import Literal, final

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.relaxation import (
    EdgeWeights,
    Relaxation,
    SearchStep,
    drawn_from,
    gumbel_noise,
    one_hot,
    straight_through,
)

Others = Literal["bare", "all", "none"]


def gumbel_softmax(alpha: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return softmax((log softmax α + noise) / τ) of every row."""
    return ((alpha.log_softmax(1) + noise) / temperature).softmax(1)


def hard_gumbel_weights(
    alpha: Tensor, noise: Tensor, temperature: float, others: Others
) -> EdgeWeights:
    """Return the weights of GDAS under this noise.

    Args:
        alpha: (num_rows, num_operations).
        noise: (num_rows, num_operations).
        temperature: τ > 0.
        others: what unselected operations do; see above.
    """
    soft = gumbel_softmax(alpha, noise, temperature)
    # of the logits: at a low τ several of p may round to the same
    selected = (alpha.detach().log_softmax(1) + noise).argmax(1, keepdim=True)
    hard = straight_through(one_hot(selected, soft), soft)
    if others == "all":
        return EdgeWeights(hard)
    running = tuple((number,) for number in selected[:, 0].tolist())
    return EdgeWeights(hard, running, bare=others == "bare")


@final
class HardGumbel(Relaxation):
    """GDAS: every edge runs the operation that it draws.

    Args:
        first_temperature: τ > 0 at the start.
        last_temperature: τ > 0 at the end.
        others: ``bare``, ``all`` or ``none``: how α of operations that were not drawn learns.

    Raises:
        ConfigurationError: if a temperature is not positive, or there is no such rule.
    """

    def __init__(
        self,
        first_temperature: float = 10.0,
        last_temperature: float = 0.1,
        others: Others = "bare",
    ) -> None:
        check_temperature("first_temperature", first_temperature)
        check_temperature("last_temperature", last_temperature)
        if others not in ("bare", "all", "none"):
            raise ConfigurationError(f"others must be bare, all or none, got {others!r}")
        self._first, self._last, self._others = first_temperature, last_temperature, others

    def temperature(self, progress: float) -> float:
        """Return τ, on a line from the first to the last."""
        return (1 - progress) * self._first + progress * self._last

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return one operation an edge, drawn by softmax(α)."""
        noise = gumbel_noise(alpha, drawn_from(step))
        return hard_gumbel_weights(alpha, noise, self.temperature(step.progress), self._others)


@final
class SoftGumbel(Relaxation):
    """FBNet: all operations run, with noisy weights that sharpen over the epochs.

    Args:
        first_temperature: τ > 0 at the start.
        decay: of τ in an epoch, in (0, 1].
        num_epochs: epochs, or rounds, of the whole search.
        alpha_from: progress in [0, 1] from which α moves; FBNet waits 10 of its 90 epochs.

    Raises:
        ConfigurationError: if a setting is out of its range.
    """

    def __init__(
        self,
        first_temperature: float = 5.0,
        decay: float = 0.956,
        num_epochs: int = 90,
        alpha_from: float = 1 / 9,
    ) -> None:
        check_temperature("first_temperature", first_temperature)
        if not 0 < decay <= 1:
            raise ConfigurationError(f"decay must be in (0, 1], got {decay}")
        if num_epochs < 1:
            raise ConfigurationError(f"num_epochs must be at least 1, got {num_epochs}")
        if not 0 <= alpha_from <= 1:
            raise ConfigurationError(f"alpha_from must be in [0, 1], got {alpha_from}")
        self._first, self._decay, self._num_epochs = first_temperature, decay, num_epochs
        self.alpha_from = alpha_from

    def temperature(self, progress: float) -> float:
        """Return τ = first · decay^epoch."""
        return float(self._first * self._decay ** (progress * self._num_epochs))

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return the noisy softmax of every row."""
        noise = gumbel_noise(alpha, drawn_from(step))
        return EdgeWeights(gumbel_softmax(alpha, noise, self.temperature(step.progress)))


def check_temperature(name: str, value: float) -> None:
    """Refuse a temperature that is not positive.

    Raises:
        ConfigurationError: if it is not.
    """
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} must be positive, got {value}")
