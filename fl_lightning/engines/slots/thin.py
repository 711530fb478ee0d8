"""Weights of thin layers: SGD's steps on them, and updates of a single step, left as products.

    Δ_k = e_kᵀ a_k

with the errors e (B, O) at a dense layer's outputs, times the learning rate, and its inputs a (B, I),
see `ThinLayers`: the compiled graph gives these factors, not the O·I numbers. `ThinSteps` makes them where
SGD adds them to the weights, by `dense_step`. `ThinDeltas` makes them where they go into the mean, by
`dense_fold`, which sums their squares as well: these tell whether all are finite.

What it is worth, on one core: a round of W3 (200 clients, one step of logistic regression each) takes 0.64
of the best loop, 0.82 without thin layers and 0.89 with deltas multiplied out; one of U-mlp (40 clients, several
steps of an MLP) 0.44 s, 0.53 s without thin layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import NotFinite
from fl_lightning.core.update import Rows
from fl_lightning.engines.functional.functional_step import Tensors
from fl_lightning.engines.slots.stacked_optimizers import StackedRule, StackedSGD
from fl_lightning.kernels import FEWEST_INPUTS, dense_fold, dense_step

# Of so few numbers, a call for each client takes longer than a copy of all.
_FEW_NUMBERS = 4096
# Sums of squares below this are finite in float32, in whatever order they are added.
_FAR_FROM_INFINITE = 1e36


class Factors(NamedTuple):
    """m matrices errorsᵀ inputs: gradients of a thin layer's weight, or deltas.

    Attributes:
        errors: at the layer's output, for deltas times the learning rate, shape (m, B, O).
        inputs: of the layer, shape (m, B, I).
    """

    errors: Tensor
    inputs: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(m, numbers of one matrix)."""
        return len(self.errors), self.errors.shape[2] * self.inputs.shape[2]

    @property
    def squares(self) -> Tensor:
        """Sum of squares of each matrix, shape (m,): Σ (e eᵀ) ∘ (a aᵀ)."""
        grams = [part @ part.mT for part in (self.errors, self.inputs)]
        return (grams[0] * grams[1]).sum((1, 2))

    def of(self, rows: Rows) -> Factors:
        """Return those of some clients."""
        return Factors(self.errors[rows], self.inputs[rows])

    def fold(self, mean: Tensor, shares: Tensor) -> Tensor:
        """Fold one after the other into a mean, a vector; return each one's sum of squares."""
        weights = mean.view(self.errors.shape[2], self.inputs.shape[2])
        return dense_fold(weights, self.errors, self.inputs, shares)


class Numbers(NamedTuple):
    """m vectors as they are.

    Attributes:
        values: shape (m, n).
    """

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return len(self.values), self.values.shape[1]

    @property
    def squares(self) -> Tensor:
        """Sum of squares of each vector, shape (m,)."""
        return self.values.square().sum(1)

    def of(self, rows: Rows) -> Numbers:
        """Return those of some clients."""
        return Numbers(self.values[rows])

    def fold(self, mean: Tensor, shares: Tensor) -> Tensor:
        """Fold one after the other into a mean, a vector; return each one's sum of squares."""
        if FEWEST_INPUTS <= len(mean) <= _FEW_NUMBERS:
            alone = self.values.unsqueeze(1)  # one example, whose error is 1
            return dense_fold(mean.unsqueeze(0), torch.ones_like(alone[..., :1]), alone, shares)
        for values, share in zip(self.values, shares.tolist(), strict=True):
            mean.lerp_(values, share)
        return self.values.square().sum(1)


class ThinDeltas:
    """m deltas of k coordinates, some of which are products that nobody has multiplied out.

    Args:
        parts: what each consists of, in order, at least one; float32 on the CPU.
        multiply: returns all numbers, shape (m, k).

    Example:
        >>> errors, inputs = torch.ones(2, 3, 1), torch.ones(2, 3, 8)
        >>> parts = [Factors(0.5 * errors, inputs), Numbers(torch.zeros(2, 1))]
        >>> deltas = ThinDeltas(parts, lambda: torch.tensor([[1.5] * 8 + [0.0]] * 2))
        >>> deltas.shape, deltas.norms
        ((2, 9), tensor([4.2426, 4.2426]))
    """

    dtype = torch.float32

    def __init__(self, parts: Sequence[Factors | Numbers], multiply: Callable[[], Tensor]) -> None:
        self._parts, self._multiply = parts, multiply
        self._norms: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        return self._parts[0].shape[0], sum(part.shape[1] for part in self._parts)

    @cached_property
    def numbers(self) -> Tensor:
        """All of them, finite or not, shape (m, k)."""
        return self._multiply()

    @property
    def whole(self) -> Tensor:
        """All numbers, shape (m, k).

        Raises:
            NotFinite: if a norm is not finite.
        """
        self._look()
        return self.numbers

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each, shape (m,); known once they are folded, before by the numbers.

        Raises:
            NotFinite: if one is not finite.
        """
        return self._look()

    @property
    def are_finite(self) -> bool:
        """True if all numbers are finite, found without them; False also if they may not be."""
        return all(float(part.squares.sum()) < _FAR_FROM_INFINITE for part in self._parts)

    def of(self, rows: Rows) -> ThinDeltas:
        """Return those of some clients."""
        return ThinDeltas([part.of(rows) for part in self._parts], lambda: self.numbers[rows])

    def fold(self, mean: Tensor, shares: npt.ArrayLike) -> None:
        """Fold one after the other into a mean, with the bits that the numbers would give it.

        Args:
            mean: shape (k,); m ← m + share · (delta - m).
            shares: of each, in [0, 1].

        Raises:
            NotFinite: if a norm is not finite; the mean is then as before.
        """
        before = mean.clone()
        weights = torch.from_numpy(np.asarray(shares, np.float32))
        places = mean.split([part.shape[1] for part in self._parts])
        folded = [p.fold(place, weights) for p, place in zip(self._parts, places, strict=True)]
        try:
            self._norms = _finite(torch.stack(folded).sum(0).sqrt())
        except NotFinite:
            mean.copy_(before)
            raise

    def _look(self) -> Tensor:
        if self._norms is None:
            self._norms = _finite(torch.linalg.vector_norm(self.numbers, dim=1))
        return self._norms


def _finite(norms: Tensor) -> Tensor:
    if not math.isfinite(norms.sum()):
        raise NotFinite
    return norms


@dataclass(frozen=True)
class ThinSteps:
    """Steps of the layers' weights by their names.

    Attributes:
        params: of all slots, shape (G, out, in).
        states: their momentum, if there is any.
        rules: how they move, see `can_be_thin`.
        lrs: learning rates, scalars.
    """

    params: Tensors
    states: Mapping[str, list[Tensor]]
    rules: Mapping[str, StackedRule]
    lrs: Mapping[str, Tensor]

    def of(self, params: Tensors, states: Mapping[str, list[Tensor]]) -> ThinSteps:
        """Return the steps of other slots, of the same clients' optimizer."""
        return ThinSteps(params, states, self.rules, self.lrs)

    def step(self, factors: Mapping[str, Factors]) -> None:
        """Step in every slot."""
        for name, factor in factors.items():
            weights = self.params[name]
            self._step(name, factor, weights, weights, self._momentum(name))

    def first(self, start: Tensors, factors: Mapping[str, Factors]) -> None:
        """Step for new clients from common parameters, given by name."""
        for name, factor in factors.items():
            weights = start[name].unsqueeze(0)
            self._step(name, factor, weights, self.params[name], self._momentum(name), first=True)

    def deltas(
        self, others: Tensor, start: Tensors, factors: Mapping[str, Factors], active: Tensors
    ) -> Tensor | ThinDeltas:
        """Return what the first step from common parameters comes to, shape (G, k).

        Without weight decay it stays the product of two factors until somebody needs its numbers.

        Args:
            others: it, without the coordinates of thin layers' weights.
            start: parameters by name, in the order of the coordinates.
            factors: of what SGD makes of the gradients without weight decay, by name.
            active: of parameters of which only some entries are coordinates, their indices.
        """
        sizes = {n: active[n].numel() if n in active else x.numel() for n, x in start.items()}
        rest = [name for name in sizes if name not in factors]
        values = dict(zip(rest, others.split([sizes[name] for name in rest], 1), strict=True))
        decays = {n: self._rule(n).weight_decay * float(self.lrs[n]) for n in factors}

        def multiply() -> Tensor:
            deltas = others.new_empty(len(others), sum(sizes.values()))
            for name, part in zip(sizes, deltas.split(list(sizes.values()), 1), strict=True):
                if name in values:
                    part.copy_(values[name])
                    continue
                to, weights = part.unflatten(1, start[name].shape), start[name].unsqueeze(0)
                errors, inputs = factors[name]
                dense_step(
                    to, None, weights, errors, inputs, keep=0, lr=-1, momentum=0, decay=decays[name]
                )
            return deltas

        if any(decays.values()):
            return multiply()
        parts = [factors.get(name) or Numbers(values[name]) for name in sizes]
        return ThinDeltas(parts, multiply)

    def _rule(self, name: str) -> StackedSGD:
        rule = self.rules[name]
        assert isinstance(rule, StackedSGD)
        return rule

    def _momentum(self, name: str) -> Tensor | None:
        states = self.states[name]
        return states[0] if states else None

    def _step(
        self,
        name: str,
        factors: Factors,
        weights: Tensor,
        to: Tensor,
        velocity: Tensor | None,
        *,
        first: bool = False,
    ) -> None:
        rule = self._rule(name)
        dense_step(
            to,
            velocity,
            weights,
            factors.errors,
            factors.inputs,
            keep=1.0,
            lr=float(self.lrs[name]),
            momentum=0.0 if first else rule.momentum,
            decay=rule.weight_decay,
        )


def can_be_thin(names: Iterable[str], rules: Mapping[str, StackedRule]) -> list[str]:
    """Return which weights move by SGD with nothing but momentum and weight decay.

    Example:
        >>> plain, nesterov = (StackedSGD(0.9, 0.0, 0.0, n, False) for n in (False, True))
        >>> can_be_thin(["a", "b", "c"], {"a": plain, "b": nesterov})
        ['a']
    """
    found = {name: rules.get(name) for name in names}
    return [n for n, rule in found.items() if isinstance(rule, StackedSGD) and rule.is_plain]
