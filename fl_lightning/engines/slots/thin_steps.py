"""SGD's steps of many clients on the weights of thin layers, see `ThinLayers`.

They follow the compiled graph, out of which the gradients come as factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.engines.functional.functional_step import Tensors
from fl_lightning.engines.slots.stacked_optimizers import StackedRule, StackedSGD
from fl_lightning.engines.slots.thin_deltas import Factors, Numbers, ThinDeltas
from fl_lightning.kernels import dense_step


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
        """Take a step in every slot."""
        for name, factor in factors.items():
            weights = self.params[name]
            self._step(name, factor, weights, weights, self._momentum(name))

    def first(self, start: Tensors, factors: Mapping[str, Factors]) -> None:
        """Take the first step from common parameters, given by name."""
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
