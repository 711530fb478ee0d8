"""Rules of relaxation that draw operations: Gumbel noise on α (GDAS, FBNet), binary gates (ProxylessNAS).

    p = softmax((log softmax α + g) / τ),   g Gumbel noise
    GDAS:   h = onehot(argmax p), with the gradient of p: one operation per edge;  τ from 10 to 0.1, linearly
    FBNet:  h = p: all operations, with weights that sharpen;   τ = 5 · 0.956^epoch

In GDAS the h of an operation that is not drawn needs a gradient as well. Three options:

    others    the operation                              gradient of its h
    bare      does not run, adds its h = 0               Σ dL/dy: as if its output were ones
    all       runs                                       Σ dL/dy · o(x)
    none      does not run                               none

With binary gates one operation per row runs in a step of the weights, and two in a step of α:

    weights:  one operation of each row, drawn by softmax(α); no gradient of α
    α:        two, drawn without replacement; q = softmax of their two logits; the gate of one, drawn by q,
              is open (g = 1), the other closed (g = 0)
              dL/dα_i = Σ_j dL/dg_j q_j (δ_ij - q_i)    over the two
              then both logits are shifted so that the other probabilities do not change

If the open gate is that of ``none``, α gets no gradient, because the loss does not depend on the other path.
ProxylessNAS uses Adam with β₁ = 0: momentum would move logits of paths that were not drawn. If the server
of a federation steps α, no logits are shifted, because clients have drawn different paths.
Sources: Dong, Yang 2019, GDAS, section 3.2, and its code for NAS-Bench-201, whose rule is ``bare``; Wu
et al. 2019, FBNet, section 3.3; Cai, Zhu, Han 2019, ProxylessNAS, eq. 4 and section 3.2.1, and its code.
Differs: GDAS's code computes (onehot - p) + p, which is one-hot up to rounding; here
onehot + (p - p), which always is.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import check_range
from fl_lightning.nas.relaxation import (
    EdgeWeights,
    Relaxation,
    SearchStep,
    drawn_from,
    drawn_operations,
    gumbel_noise,
    one_hot,
    straight_through,
)

Others = Literal["bare", "all", "none"]


def gumbel_softmax(alpha: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return softmax((log softmax α + noise) / τ), row by row: noisy operation probabilities."""
    return ((alpha.log_softmax(1) + noise) / temperature).softmax(1)


def hard_gumbel_weights(
    alpha: Tensor, noise: Tensor, temperature: float, others: Others
) -> EdgeWeights:
    """Return edge weights of the GDAS relaxation: one operation per edge, drawn with the given Gumbel noise.

    Args:
        alpha: logits, shape (num_rows, num_operations).
        noise: Gumbel noise, same shape.
        temperature: τ > 0.
        others: gradient for operations that are not drawn, see `HardGumbel`.
    """
    soft = gumbel_softmax(alpha, noise, temperature)
    # argmax of the logits: at a low τ several probabilities may round to the same number
    selected = (alpha.detach().log_softmax(1) + noise).argmax(1, keepdim=True)
    hard = straight_through(one_hot(selected, soft), soft)
    if others == "all":
        return EdgeWeights(hard)
    running = tuple((number,) for number in selected[:, 0].tolist())
    return EdgeWeights(hard, running, bare=others == "bare")


@final
class HardGumbel(Relaxation):
    """GDAS relaxation: each edge runs one operation, drawn with Gumbel noise; α gets a softmax's gradient.

    Args:
        first_temperature: temperature τ at the start, above 0.
        last_temperature: temperature τ at the end, above 0.
        others: gradient of α for operations that are not drawn. ``bare``: as if their output were ones (the
            released code). ``all``: from their output, for which all operations run. ``none``: zero.
    """

    def __init__(
        self,
        first_temperature: float = 10.0,
        last_temperature: float = 0.1,
        others: Others = "bare",
    ) -> None:
        check_range("first_temperature", first_temperature, "above 0 and finite")
        check_range("last_temperature", last_temperature, "above 0 and finite")
        self._first, self._last, self._others = first_temperature, last_temperature, others

    def temperature(self, progress: float) -> float:
        """Return the softmax temperature τ at `progress`, the completed fraction of the search in [0, 1]."""
        return (1 - progress) * self._first + progress * self._last

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        noise = gumbel_noise(alpha, drawn_from(step))
        return hard_gumbel_weights(alpha, noise, self.temperature(step.progress), self._others)


@final
class SoftGumbel(Relaxation):
    """FBNet relaxation: all operations run, weighted by a noisy softmax of α that becomes sharper over epochs.

    Args:
        first_temperature: temperature τ at the start, above 0.
        decay: factor of τ per epoch, in (0, 1].
        num_epochs: number of epochs (rounds) over which τ falls; a run of another length is scaled to it.
        alpha_from: fraction of the search, in [0, 1], in which α does not move; 10 of 90 epochs in FBNet.
    """

    def __init__(
        self,
        first_temperature: float = 5.0,
        decay: float = 0.956,
        num_epochs: int = 90,
        alpha_from: float = 1 / 9,
    ) -> None:
        check_range("first_temperature", first_temperature, "above 0 and finite")
        check_range("decay", decay, "in (0, 1]")
        check_range("num_epochs", num_epochs, "at least 1")
        check_range("alpha_from", alpha_from, "in [0, 1]")
        self._first, self._decay, self._num_epochs = first_temperature, decay, num_epochs
        self.alpha_from = alpha_from

    def temperature(self, progress: float) -> float:
        """Return the softmax temperature τ at `progress`, the completed fraction of the search in [0, 1]."""
        return float(self._first * self._decay ** (progress * self._num_epochs))

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        noise = gumbel_noise(alpha, drawn_from(step))
        return EdgeWeights(gumbel_softmax(alpha, noise, self.temperature(step.progress)))


def gate_weights(alpha: Tensor, paths: Tensor, opened: Tensor, *, none: int = -1) -> EdgeWeights:
    """Return edge weights with a 1 for one operation per edge, and the gradient of a softmax over several.

    Args:
        alpha: logits, shape (num_rows, num_operations).
        paths: indices of the operations that run, shape (num_rows, num_paths).
        opened: index of the operation with the open gate, one of the `paths`, shape (num_rows, 1).
        none: index of the operation ``none``: rows in which its gate is open have no gradient.
    """
    paths = paths.to(alpha.device)
    shares = alpha.gather(1, paths).softmax(1)
    soft = torch.zeros_like(alpha).scatter(1, paths, shares)
    soft = torch.where(opened.to(alpha.device) == none, soft.detach(), soft)
    running = tuple(tuple(sorted(row)) for row in paths.tolist())
    return EdgeWeights(straight_through(one_hot(opened, alpha), soft), running)


def shifted(before: Tensor, after: Tensor, moved: Tensor) -> Tensor:
    """Return stepped logits, shifted so that probabilities of operations without a step do not change.

    The sum of the exponentials of the moved logits is that before the step.

    Args:
        before: logits before the step, shape (num_rows, num_operations).
        after: logits after the step, same shape.
        moved: True for logits that the step moved, same shape.
    """
    sums = [logits.masked_fill(~moved, -torch.inf).logsumexp(1) for logits in (before, after)]
    offset = (sums[1] - sums[0])[:, None]
    return torch.where(moved, after - offset, before)


@final
class BinaryGates(Relaxation):
    """ProxylessNAS relaxation: per edge, one operation runs in a step of the weights, two in a step of α.

    Args:
        paths: operations per edge that run in a step of α: ``two``, or ``all``, with memory for all.
    """

    def __init__(self, paths: Literal["two", "all"] = "two") -> None:
        self._paths = paths

    @override
    def weights(self, alpha: Tensor, step: SearchStep) -> EdgeWeights:
        generator, num_operations = drawn_from(step), alpha.shape[1]
        if not step.moves_alpha:
            drawn = drawn_operations(alpha, 1, generator)
            return gate_weights(alpha.detach(), drawn, drawn)
        num_paths = num_operations if self._paths == "all" else min(2, num_operations)
        paths = drawn_operations(alpha, num_paths, generator)
        among = alpha.detach().cpu().gather(1, paths)
        opened = paths.gather(1, drawn_operations(among, 1, generator))
        return gate_weights(alpha, paths, opened, none=step.none)

    @override
    def stepped(self, before: Tensor, after: Tensor, weights: EdgeWeights) -> Tensor:
        if weights.running is None:
            return after
        moved = torch.zeros_like(before, dtype=torch.bool)
        for row, numbers in enumerate(weights.running):
            moved[row, list(numbers)] = True
        return shifted(before, after, moved)
